"""The files of an OpenVINO model directory: which graph it has, and what its JSON files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from kvtape.capacity.errors import ModelFileError

__all__ = ["CONFIG", "ir_graph_file", "read_settings"]

CONFIG: Final = "config.json"

_GRAPHS: Final = ("openvino_model.xml", "openvino_language_model.xml")


def ir_graph_file(folder: Path) -> Path:
    """The graph of a model directory. Raises ModelFileError where there is none."""
    found = next((folder / name for name in _GRAPHS if (folder / name).is_file()), None)
    if found is None:
        raise ModelFileError(
            f"{folder}: no {_GRAPHS[0]} in this folder; give a GGUF, or the folder of an OpenVINO model"
        )
    return found


def read_settings(file: Path) -> dict[str, Any]:
    """A JSON file's settings, those of its language model first; none where there is no file. Raises ModelFileError."""
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as err:
        raise ModelFileError(f"{file}: not JSON ({err}); copy the model's folder again") from None
    if not isinstance(settings, dict):
        raise ModelFileError(f"{file}: not a map of settings; copy the model's folder again")
    inner = settings.get("text_config")
    return {**settings, **inner} if isinstance(inner, dict) else settings
