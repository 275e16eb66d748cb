"""Whether two models mean the same by every token id: what one proposes is else nonsense to the other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kvtape.backends.errors import UsageError
from kvtape.capacity.gguf_file import open_gguf

__all__ = ["check_same_vocabulary", "vocabulary_digest"]

_TOKENS = "tokenizer.ggml.tokens"
_IR_FILES = ("openvino_tokenizer.xml", "openvino_tokenizer.bin")


def check_same_vocabulary(target: str | Path, draft: str | Path) -> None:
    """Raises UsageError where the two have other tokens, or nobody can tell."""
    of_target, of_draft = Path(target), Path(draft)
    if of_target.is_dir() != of_draft.is_dir():
        raise UsageError(
            f"{of_draft.name}: vocabularies of a GGUF and of an OpenVINO directory are not compared; take two of a kind"
        )
    if vocabulary_digest(of_target) != vocabulary_digest(of_draft):
        raise UsageError(
            f"{of_draft.name}: its vocabulary is not that of {of_target.name}; a draft model needs the same one"
        )


def vocabulary_digest(path: Path) -> str:
    """SHA-256 hex over the tokens of a GGUF in order, or over the tokenizer of an OpenVINO directory.

    Raises UsageError where there is none, ModelFileError.
    """
    digest = hashlib.sha256()
    if path.is_dir():
        files = [path / name for name in _IR_FILES if (path / name).is_file()]
        if not files:
            raise UsageError(
                f"{path}: no {_IR_FILES[0]} in it, so its vocabulary is not known"
                "; convert the model again, with its tokenizer"
            )
        for file in files:
            digest.update(file.read_bytes())
        return digest.hexdigest()
    fields = open_gguf(path).fields
    if _TOKENS not in fields:
        raise UsageError(f"{path}: the GGUF has no {_TOKENS}, so its vocabulary is not known")
    field: Any = fields[_TOKENS]
    for part in field.parts:
        digest.update(part.tobytes())
    return digest.hexdigest()
