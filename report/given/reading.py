"""Reading the results that a report is given: by their schema, whole or not at all, and of the log that is reported on.

A result of another log, or of another model, would be taken for this one's beside its pictures: it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from kvtape.backends.errors import UsageError
from kvtape.report.given.shapes import Certification, Curve, Evaluation, Fidelity, Gate, Replay, Tune, Whatif
from kvtape.sim.costs.model import COSTS_SCHEMA, CostTable, read_costs
from kvtape.sim.errors import CostsError

__all__ = ["ACCEPTED", "KINDS", "Given", "Named", "Subject", "read_given"]

T = TypeVar("T")

_SHAPES: Final[Mapping[str, type]] = {
    "kvtape.certify/1": Certification,
    "kvtape.curve/1": Curve,
    "kvtape.eval/1": Evaluation,
    "kvtape.fidelity/1": Fidelity,
    "kvtape.gate/1": Gate,
    "kvtape.replay/1": Replay,
    "kvtape.tune/1": Tune,
    "kvtape.whatif/1": Whatif,
}

KINDS: Final[Mapping[type, str]] = {
    Certification: "certifications, of kvtape certify",
    CostTable: "costs, of kvtape calibrate",
    Curve: "hit rates, of kvtape curve",
    Evaluation: "an evaluation, of kvtape eval",
    Fidelity: "fidelity of the simulator, of make fidelity",
    Gate: "optimisations at the gate, of kvtape gate",
    Replay: "a replay, of kvtape replay",
    Tune: "a search, of kvtape tune",
    Whatif: "simulated policies, of kvtape whatif",
}
"""What each kind of result is, in words."""

ACCEPTED: Final = (
    "what kvtape replay, whatif, tune, curve, certify, gate and eval print with --json, costs of kvtape calibrate "
    "--out, and fidelity.json of make fidelity"
)
"""What `read_given` takes, for people."""

_BESIDE_LOGS: Final = (".head.json", ".follow.json")
"""Parts of logs, which nobody takes for results."""


@dataclass(frozen=True, slots=True)
class Named(Generic[T]):
    """A result and the name of the file that it came in, without its folder."""

    name: str
    value: T


@dataclass(frozen=True, slots=True)
class Subject:
    """What results must be of: the log's name, the logical digests of its runs, the fingerprints of its models.

    A log without a model (of requests that were imported) takes results of any.
    """

    name: str
    digests: frozenset[str]
    models: frozenset[str]


@dataclass(frozen=True, slots=True)
class Given:
    """All results by kind, in the order in which they were named. `left_out`: files of folders, with the reason."""

    results: tuple[Named[Any], ...] = ()
    left_out: tuple[str, ...] = ()

    def of(self, kind: type[T]) -> tuple[Named[T], ...]:
        """Those of one kind: a shape of `shapes`, or `CostTable`."""
        return tuple(r for r in self.results if isinstance(r.value, kind))


def read_given(places: Sequence[Path], subject: Subject) -> Given:
    """The results in files, and in the *.json of folders, where what is none or of something else is left out.

    Raises UsageError for a file that is not there, is no result, is damaged, or is of another log or model.
    """
    results: list[Named[Any]] = []
    left_out: list[str] = []
    seen: set[Path] = set()
    for place, in_folder in _files(places):
        if place.resolve() in seen:
            continue
        seen.add(place.resolve())
        try:
            value = _read(place)
            _require_subject(place, value, subject)
        except UsageError as err:
            if not in_folder or isinstance(err, _Damaged):
                raise
            left_out.append(f"{place.name}: {err.short if isinstance(err, _Refused) else err}")
            continue
        results.append(Named(place.name, value))
    return Given(tuple(results), tuple(left_out))


class _Damaged(UsageError):
    """A file that says it is a result and is not a whole one: nobody leaves that out in silence."""


class _Refused(UsageError):
    """A file that a report does not take. `short`: why, without its name and the remedy."""

    def __init__(self, place: Path, short: str, remedy: str) -> None:
        super().__init__(f"{place}: {short}; {remedy}")
        self.short = short


def _files(places: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    for place in places:
        if place.is_dir():
            beside = tuple(name for name in sorted(place.glob("*.json")) if not name.name.endswith(_BESIDE_LOGS))
            yield from ((file, True) for file in beside)
        else:
            yield place, False


def _read(place: Path) -> Any:
    try:
        text = place.read_text(encoding="utf-8")
        said = json.loads(text, parse_constant=_no_number)
    except FileNotFoundError:
        raise _Refused(place, "no such file", f"a report takes {ACCEPTED}") from None
    except (ValueError, RecursionError):  # no UTF-8, no JSON
        raise _Refused(place, "no JSON", f"a report takes {ACCEPTED}") from None
    schema = said.get("schema") if isinstance(said, dict) else None
    if schema == COSTS_SCHEMA:
        return _costs(place)
    shape = _SHAPES.get(schema) if isinstance(schema, str) else None
    if shape is None:
        what = f"schema {schema!r} is not for a report" if isinstance(schema, str) else "no result of kvtape"
        raise _Refused(place, what, f"it takes {ACCEPTED}")
    try:
        return _adapter(shape).validate_json(json.dumps(_with_known_proofs(said)), strict=True)
    except ValidationError as err:
        first = err.errors()[0]
        at = ".".join(str(part) for part in first["loc"]) or "the document"
        raise _Damaged(
            f"{place}: not a whole {schema} ({at}: {first['msg']}); make it again with this version of kvtape"
        ) from None


def _no_number(text: str) -> None:
    """NaN and infinities are no JSON, and kvtape never writes them."""
    raise ValueError(text)


def _costs(place: Path) -> CostTable:
    try:
        return read_costs(place)
    except CostsError as err:
        raise _Damaged(str(err)) from None


@cache
def _adapter(shape: type) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def _with_known_proofs(said: dict[str, Any]) -> dict[str, Any]:
    """Rows of certify bear `abilities`, which follow from their measures; a row of proof has no such field."""
    if said["schema"] != "kvtape.certify/1" or not isinstance(said.get("rows"), list):
        return said
    rows = [{k: v for k, v in r.items() if k != "abilities"} if isinstance(r, dict) else r for r in said["rows"]]
    return said | {"rows": rows}


def _require_subject(place: Path, value: Any, subject: Subject) -> None:
    log = _log_of(value)
    if log is not None and log not in subject.digests:
        what = f"a result of another log (digest {log[:12]}), not of {subject.name}"
        raise _Refused(place, what, "make it of this one, or leave it out")
    models = _models_of(value)
    if models and subject.models and not models & subject.models:
        what = f"a result of another model ({min(models)}) than {subject.name} has"
        raise _Refused(place, what, "make it of the log's model, or leave it out")


def _log_of(value: Any) -> str | None:
    if isinstance(value, Replay):
        return value.log_digest
    return value.source_digest if isinstance(value, Whatif | Tune | Curve) else None


_MODELS_OF: Final[Mapping[type, Callable[[Any], Collection[str | None]]]] = {
    Certification: lambda found: [row.fingerprint for row in found.rows],
    Evaluation: lambda found: [found.model],
    CostTable: lambda found: [found.origin.model_fingerprint],
}


def _models_of(value: Any) -> frozenset[str]:
    named = _MODELS_OF.get(type(value))
    return frozenset(model for model in named(value) if model is not None) if named is not None else frozenset()
