"""Text to token ids and back through openvino-genai's tokenizer, without its silent cut.

It returns at most 8192 ids and drops the beginning of a longer text without a word. A byte-level tokenizer gives no
more ids than bytes, so text is fed in pieces below that many bytes, cut where no token can reach across: before a
space between two ASCII letters.

It also takes control tokens such as `<|im_end|>` written in the text for the tokens themselves, and cannot be told not
to. In plain text they are text, on every backend; such a text is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtape.backends.errors import EnvironmentProblem, InputRejected
from kvtape.backends.openvino.graph import last_line

__all__ = ["NativeTokenizer", "pieces"]

_MOST_IDS = 8192
_PIECE_BYTES = 8000
_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")


class NativeTokenizer:
    """Of a GGUF or of a folder. `kind` is its tokenizer model; only `gpt2` (byte-level BPE) text may be cut.

    Loads on first use (2 s), so that a model without one serves whoever brings token ids.
    """

    def __init__(self, path: Path, kind: str, n_vocab: int) -> None:
        self._path = path
        self._kind = kind
        self._n_vocab = n_vocab
        self._native: Any = None

    def encode(self, text: str) -> list[int]:
        """Plain text, nothing added. Raises InputRejected for text that cannot be encoded as it is or cut safely."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as err:
            raise InputRejected(
                f"the text is not valid Unicode ({err.reason} at character {err.start})"
                "; give text that can be written as UTF-8"
            ) from None
        ids: list[int] = []
        for piece in pieces(text) if self._kind == "gpt2" else (text,):
            got = self._encode_piece(piece)
            if len(got) >= _MOST_IDS:
                raise InputRejected(
                    f"a stretch of {len(piece)} characters gives {_MOST_IDS} tokens or more and has no safe "
                    "place to be cut; OpenVINO's tokenizer would drop its beginning"
                )
            ids += got
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Control tokens included; bytes that are no UTF-8 become the replacement character."""
        for token in tokens:
            if not 0 <= token < self._n_vocab:
                raise InputRejected(f"token {token} is outside the vocabulary [0, {self._n_vocab})")
        if not tokens:
            return ""
        tokenizer = self._tokenizer()
        try:
            return str(tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False))
        except RuntimeError as err:  # a folder without a detokenizer
            raise EnvironmentProblem(
                f"{self._path}: openvino-genai cannot write these tokens as text ({last_line(err)}); pass token ids"
            ) from None

    def _encode_piece(self, piece: str) -> list[int]:
        if not piece:
            return []
        tokenizer = self._tokenizer()
        try:
            out = tokenizer.encode(piece, add_special_tokens=False)
        except (RuntimeError, IndexError) as err:
            raise EnvironmentProblem(
                f"{self._path}: openvino-genai cannot tokenize with this vocabulary ({last_line(err)}); "
                "tokenize elsewhere and pass token ids"
            ) from None
        ids = [int(t) for t in out.input_ids.data[0]]
        for token in dict.fromkeys(ids) if self._has_control(ids) else ():
            if self._has_control([token]):
                raise InputRejected(
                    f"the text holds {self.decode([token])!r}, which OpenVINO's tokenizer takes for a control token; "
                    "take it out, or pass token ids"
                )
        return ids

    def _has_control(self, ids: Sequence[int]) -> bool:
        return str(self._tokenizer().decode(list(ids), skip_special_tokens=True)) != self.decode(ids)

    def _tokenizer(self) -> Any:
        if self._native is None:
            try:
                import openvino_genai
            except ImportError as err:
                raise EnvironmentProblem(
                    f"openvino-genai is not installed ({err}); pip install 'kvtape[openvino]'"
                ) from None
            try:
                self._native = openvino_genai.Tokenizer(str(self._path))
            except (RuntimeError, IndexError) as err:
                raise EnvironmentProblem(
                    f"{self._path}: openvino-genai finds no tokenizer: {last_line(err)}; pass token ids, or put "
                    "openvino_tokenizer.xml and openvino_detokenizer.xml with their .bin there"
                ) from None
        return self._native


def pieces(text: str) -> Iterator[str]:
    """`text` in pieces of at most 8000 bytes where a safe cut allows it; joined they are `text`."""
    start = last = size = 0
    for cut in (*(m.start() for m in _CUT.finditer(text)), len(text)):
        grown = len(text[last:cut].encode())
        if size and size + grown > _PIECE_BYTES:
            yield text[start:last]
            start, size = last, 0
        size += grown
        last = cut
    if start < len(text):
        yield text[start:]
