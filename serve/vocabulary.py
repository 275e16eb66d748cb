"""What a server needs of a model's vocabulary: its chat template, and which texts are control tokens.

From a GGUF's own metadata, or from the files that a model directory has: `chat_template.jinja` and
`tokenizer_config.json` as transformers writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.gguf_file import open_gguf

__all__ = ["Vocabulary", "read_vocabulary"]

_CONTROL = 3
"""`tokenizer.ggml.token_type` of a control token (gguf.TokenType.CONTROL)."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`control`: text of each control token, and its id. `bos`, `eos`: their texts, empty where there is none.

    `begin`: the ids that a plain text begins with. `template`: the chat template's source; None where the model has
    none.
    """

    control: Mapping[str, int] = field(default_factory=dict)
    bos: str = ""
    eos: str = ""
    begin: tuple[int, ...] = ()
    template: str | None = None


def read_vocabulary(model: str | Path) -> Vocabulary:
    """Of a GGUF file or a model directory. Raises ModelFileError."""
    path = Path(model)
    return _of_directory(path) if path.is_dir() else _of_gguf(path)


def _of_gguf(path: Path) -> Vocabulary:
    fields = open_gguf(path).fields

    def value(key: str, default: Any = None) -> Any:
        return fields[f"tokenizer.{key}"].contents() if f"tokenizer.{key}" in fields else default

    try:
        tokens, types = value("ggml.tokens", []), value("ggml.token_type", [])
        control = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=False)) if int(kind) == _CONTROL}
        template = value("chat_template")
    except (UnicodeDecodeError, ValueError) as err:
        raise ModelFileError(f"{path}: damaged GGUF ({err}); copy or download it again") from None

    def spelled(key: str) -> str:
        token = value(f"ggml.{key}_token_id")
        return str(tokens[int(token)]) if token is not None and int(token) < len(tokens) else ""

    bos = value("ggml.bos_token_id")
    # llama.cpp's default where the key is missing: added for SentencePiece vocabularies alone.
    adds = bool(value("ggml.add_bos_token", value("ggml.model") == "llama"))
    return Vocabulary(
        control=control,
        bos=spelled("bos"),
        eos=spelled("eos"),
        begin=(int(bos),) if adds and bos is not None else (),
        template=None if template is None else str(template),
    )


def _of_directory(path: Path) -> Vocabulary:
    config = _json(path / "tokenizer_config.json")
    added = config.get("added_tokens_decoder", {})
    control = {}
    for token, entry in added.items() if isinstance(added, dict) else ():
        if isinstance(entry, dict) and entry.get("special"):
            control[str(entry.get("content"))] = int(token)
    file = path / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    bos = _text(config.get("bos_token"))
    begin = (control[bos],) if config.get("add_bos_token") and bos in control else ()
    return Vocabulary(control, bos, _text(config.get("eos_token")), begin, template if template else None)


def _text(token: Any) -> str:
    """A special token is a text, or an object with its text in `content`."""
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as err:
        raise ModelFileError(f"{path}: not a JSON file ({err}); export the model again") from None
    return value if isinstance(value, dict) else {}
