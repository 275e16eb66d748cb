"""Is a precision knob proven here? What a passing row lets through, and how to get one.

A row advertises its knob when nothing of `open`, `quality` and `capacity` failed. The other abilities stand for one
capability each, which is withheld from a session unless it passed: `round_trip` the cold store, `snapshot` snapshots,
`shift` the rotation of keys. So a type that drifts under shifts is still advertised to sessions that never shift.
"""

from __future__ import annotations

from typing import Final

from kvtape.backends.proofs.knobs import BASE, Precision, certify_command, precision_subject
from kvtape.backends.proofs.machine import machine_class
from kvtape.backends.proofs.rows import Ability, ProofRow
from kvtape.backends.proofs.store import Proofs, open_proofs
from kvtape.backends.protocol import ModelFacts, SessionConfig

__all__ = [
    "ABILITY_OF_FLAG",
    "CORE",
    "precision_of",
    "precision_problem",
    "precision_row",
    "withheld_by",
]

CORE: Final[tuple[Ability, ...]] = ("open", "quality", "capacity")
"""What must pass before a knob is advertised at all."""

ABILITY_OF_FLAG: Final[dict[str, Ability]] = {
    "cold_store": "round_trip",
    "position_shift": "shift",
    "snapshot_state": "snapshot",
}
"""Which ability a capability needs to have passed on a knob."""


def precision_row(
    engine: str, engine_version: str, facts: ModelFacts, config: SessionConfig, proofs: Proofs | None = None
) -> ProofRow | None:
    """The newest certification of this knob on this model, engine version and machine class; None without one."""
    subject = precision_subject(engine, config)
    if subject is None:
        return None
    return (open_proofs() if proofs is None else proofs).newest(
        "certification",
        fingerprint=facts.fingerprint,
        engine=engine,
        engine_version=engine_version,
        machine=machine_class(),
        subject=subject,
    )


def precision_problem(
    engine: str, engine_version: str, facts: ModelFacts, config: SessionConfig, proofs: Proofs | None = None
) -> str | None:
    """Why a session with this effective configuration is not advertised, with the remedy; None where it is.

    `config.uncertified` does not matter here: it is about opening such a session all the same.
    """
    subject = precision_subject(engine, config)
    if subject is None:
        return None
    row = precision_row(engine, engine_version, facts, config, proofs)
    command, or_else = certify_command(engine, facts, config), "or open it uncertified (--uncertified)"
    if row is None:
        return (
            f"{subject} is not certified for this model on {engine_version} and this machine class; "
            f"certify it with: {command}; {or_else}"
        )
    if row.verdict == "pass":
        return None
    why = row.reason or "see its row in docs/certification.md or kvtape certify --json"
    return (
        f"{subject} did not pass certification on {row.day} ({row.verdict}: {why}); "
        f"measure it once more with: {command} --again; {or_else}"
    )


def precision_of(
    engine: str, engine_version: str, facts: ModelFacts, config: SessionConfig, proofs: Proofs | None = None
) -> Precision:
    """As a session sees it: nothing is withheld from a base precision, nor from one that is opened uncertified."""
    subject = precision_subject(engine, config)
    if subject is None:
        return BASE
    row = precision_row(engine, engine_version, facts, config, proofs)
    if row is None or row.verdict != "pass":
        return Precision(subject, certified=False)
    if config.uncertified:
        return Precision(subject, certified=True)
    return Precision(subject, certified=True, withheld=withheld_by(row))


def withheld_by(row: ProofRow) -> dict[str, str]:
    """The capabilities that sessions on a passing row's knob do without, each with the reason."""
    return {
        flag: f"{row.subject} did not pass {ability} when it was certified on {row.day} ({_why(row, ability)})"
        for flag, ability in ABILITY_OF_FLAG.items()
        if row.ability(ability) != "pass"
    }


def _why(row: ProofRow, ability: Ability) -> str:
    found = [m for m in row.measures if m.ability == ability and m.verdict != "pass"]
    return "; ".join(m.reason or f"{m.name} {m.value} {m.unit}".rstrip() for m in found) or "not measured"
