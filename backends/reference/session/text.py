"""Text to tokens for an engine that has no tokeniser of its own: that of whichever engine is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvtape.backends.errors import EnvironmentProblem
from kvtape.capacity.model import ModelShape

__all__ = ["Text"]


class _Tokenizer(Protocol):
    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> str: ...


class Text:
    """Loads on first use: llama.cpp's vocabulary, or OpenVINO's where llama.cpp is not installed or the model a folder.

    Both give the same ids for plain text. Raises EnvironmentProblem where neither is there.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._tokenizer: _Tokenizer | None = None

    def tokenize(self, text: str) -> list[int]:
        return self._loaded().tokenize(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._loaded().detokenize(tokens)

    def close(self) -> None:
        self._tokenizer = None

    def _loaded(self) -> _Tokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = _of_llama(self._shape)
            except EnvironmentProblem as first:
                self._tokenizer = _of_openvino(self._shape, first)
        return self._tokenizer


def _of_llama(shape: ModelShape) -> _Tokenizer:
    if Path(shape.path).is_dir():
        raise EnvironmentProblem(f"{shape.path}: llama.cpp reads no folder of an OpenVINO model")
    from kvtape.backends.llama.native import NativeModel

    return NativeModel(shape.path)


def _of_openvino(shape: ModelShape, first: EnvironmentProblem) -> _Tokenizer:
    from importlib.util import find_spec

    if find_spec("openvino") is None or find_spec("openvino_tokenizers") is None:
        if Path(shape.path).is_dir():
            raise EnvironmentProblem(
                f"{shape.path}: the tokeniser of a model folder is OpenVINO's, which is not here; "
                "pip install 'kvtape[openvino]'"
            )
        raise EnvironmentProblem(
            f"the reference takes its tokeniser from llama.cpp or OpenVINO, and neither is here: {first}"
        )
    from kvtape.backends.openvino.tokenizer import NativeTokenizer

    class Native:
        _inner = NativeTokenizer(Path(shape.path), shape.tokenizer, shape.n_vocab)

        def tokenize(self, text: str) -> list[int]:
            return self._inner.encode(text)

        def detokenize(self, tokens: Sequence[int]) -> str:
            return self._inner.decode(tokens)

    return Native()
