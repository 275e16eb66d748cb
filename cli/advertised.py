"""Which precisions a model's passing rows advertise here, on each engine as it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["advertised"]


def advertised(model: Path, versions: Mapping[str, str]) -> list[dict[str, Any]]:
    """One entry a precision: `engine`, `precision`, the `day` of its row (None: it needs none), `without`: the
    capabilities that its row withholds.

    `versions`: of each engine, as it calls itself. Raises UsageError for a damaged document of proofs.
    """
    from kvtape.backends.proofs.check import withheld_by
    from kvtape.backends.proofs.knobs import BASE_TEXTS
    from kvtape.backends.proofs.machine import machine_class
    from kvtape.backends.proofs.store import open_proofs
    from kvtape.capacity.model import read_model

    fingerprint, machine = read_model(model).fingerprint, machine_class()
    rows = open_proofs().current("certification")
    found: list[dict[str, Any]] = []
    for engine, version in versions.items():
        base = BASE_TEXTS.get(engine, ())
        found += [_entry(engine, text, None, ()) for text in base]
        for row in rows:
            here = (row.fingerprint, row.engine, row.engine_version, row.machine)
            own = row.ability("quality") == "pass"  # the row of `auto` names another one
            if (
                own
                and row.verdict == "pass"
                and row.subject not in base
                and here == (fingerprint, engine, version, machine)
            ):
                found.append(_entry(engine, row.subject, row.day, withheld_by(row)))
    return found


def _entry(engine: str, precision: str, day: str | None, without: Iterable[str]) -> dict[str, Any]:
    return {"engine": engine, "precision": precision, "day": day, "without": sorted(without)}
