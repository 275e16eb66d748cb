"""The user's models by name: an explicit list of files, each with its hash and the role that it was added for.

A draft model is found by its name alone, and only while its file is the one that was added: what is run beside a
session is never just whatever lies at a path.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from kvtape.backends.errors import UsageError
from kvtape.backends.user_documents import Document, document_text, parse_document
from kvtape.backends.user_files import alone, data_file, write_whole
from kvtape.capacity.model import read_model
from kvtape.traces.sidecar import file_digest

__all__ = [
    "MODELS_VARIABLE",
    "Artifact",
    "ArtifactState",
    "Role",
    "add_artifact",
    "artifact_named",
    "artifacts",
    "file_hash",
    "models_path",
    "remove_artifact",
    "state_of",
]

MODELS_VARIABLE: Final = "KVTAPE_MODELS"
_SCHEMA: Final = "kvtape.models/1"
_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$"

Role = Literal["target", "draft"]
ArtifactState = Literal["ok", "changed", "missing"]


class Artifact(BaseModel):
    """`file`: absolute path of a GGUF, or of an OpenVINO model directory. `sha256`: see `file_hash`.

    `fingerprint`: see capacity.model.fingerprint.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=_NAME)
    file: str = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    fingerprint: str = Field(min_length=1)
    role: Role


class _Document(Document):
    models: tuple[Artifact, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path

    def read(self) -> tuple[Artifact, ...]:
        if not self.path.exists():
            return ()
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as err:
            raise UsageError(f"{self.path}: the models cannot be read ({err}); restore the file or remove it") from None
        where, what = str(self.path), "list of models"
        return parse_document(_Document, text, schema=_SCHEMA, where=where, what=what).models

    def write(self, models: Sequence[Artifact]) -> None:
        rows = sorted(models, key=lambda m: m.name)
        write_whole(self.path, document_text(_SCHEMA, "models", rows))


def models_path() -> Path:
    """The list: what KVTAPE_MODELS names, else `kvtape/models.json` in the user's data folder."""
    return data_file("models.json", MODELS_VARIABLE)


def file_hash(path: Path) -> str:
    """SHA-256 hex of a file; of a directory over the names and hashes of its files. Raises UsageError."""
    try:
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file())
            told = "".join(f"{p.relative_to(path).as_posix()} {file_hash(p)}\n" for p in files)
            return hashlib.sha256(told.encode()).hexdigest()
        return file_digest(path)
    except OSError as err:
        raise UsageError(f"{path}: cannot be read ({err.strerror}); give the path of a model") from None


def artifacts(path: Path | None = None) -> tuple[Artifact, ...]:
    """All models by name. Raises UsageError, which names the list, for a damaged one."""
    return _Place(path or models_path()).read()


def add_artifact(name: str, file: Path, role: str, path: Path | None = None) -> Artifact:
    """Add a model, durably. Raises UsageError for a name that is taken or no name, another role, no model; OSError.

    A draft model's session is as long as the draft was trained for: a folder that does not say so is UsageError too.
    """
    if role not in get_args(Role):
        raise UsageError(f"role {role!r}: choose one of {', '.join(get_args(Role))}")
    if not file.exists():
        raise UsageError(f"{file}: no such model file; give the path of a GGUF")
    if re.fullmatch(_NAME, name) is None:
        raise UsageError(f"name {name!r}: begin with a letter or digit, go on with those and ._-")
    whole = file.resolve()
    # First what it is: any other folder may be a whole disk, and a hash of that takes hours.
    shape = read_model(whole)
    if role == "draft" and whole.is_dir() and not shape.n_ctx_train:
        raise UsageError(
            f"{file}: the folder does not say for how many tokens the model was trained; put its config.json "
            "(max_position_embeddings) there, then add it"
        )
    known = {"sha256": file_hash(whole), "fingerprint": shape.fingerprint}
    made = Artifact.model_validate({"name": name, "file": str(whole), "role": role, **known})
    place = _Place(path or models_path())
    with alone(place.path):
        there = place.read()
        if any(m.name == name for m in there):
            raise UsageError(f"{name}: is there already; remove it first, or choose another name")
        place.write([*there, made])
    return made


def remove_artifact(name: str, path: Path | None = None) -> Artifact:
    """Take a model off the list; its file stays. Raises UsageError for an unknown name, OSError."""
    place = _Place(path or models_path())
    with alone(place.path):
        there = place.read()
        gone = _found(there, name, place.path)
        place.write([m for m in there if m.name != name])
    return gone


def artifact_named(name: str, role: Role, path: Path | None = None) -> Artifact:
    """The model of this name, its file as it was when it was added.

    Raises UsageError for an unknown name, one of another role, a file that is gone or has changed.
    """
    place = _Place(path or models_path())
    found = _found(place.read(), name, place.path)
    if found.role != role:
        raise UsageError(
            f"{name}: was added as a {found.role} model, not as a {role} model"
            "; name another, or add it under another name"
        )
    state = state_of(found)
    if state != "ok":
        what = "is gone" if state == "missing" else "is not the file that was added (its SHA-256 differs)"
        raise UsageError(f"{name}: {found.file} {what}; put it back, or remove {name} and add it anew")
    return found


def state_of(artifact: Artifact) -> ArtifactState:
    """Whether its file is the one that was added."""
    path = Path(artifact.file)
    if not path.exists():
        return "missing"
    return "ok" if file_hash(path) == artifact.sha256 else "changed"


def _found(models: Sequence[Artifact], name: str, path: Path) -> Artifact:
    for model in models:
        if model.name == name:
            return model
    listed = ", ".join(m.name for m in models) or "none"
    raise UsageError(
        f"no model {name!r} in {path}; there is: {listed}. kvtape models add NAME FILE --role draft adds one"
    )
