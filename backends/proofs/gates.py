"""Has an optimisation been let through here? The newest row of the gate for it, and how to get one.

A row of the gate speaks of one optimisation on one workload, with the threads and the KV types that it was measured
with; it lets nothing through for another model, engine version, or class of machine (`speed_class`: times depend on
the number of cores too). Of the same thing the newest row counts, also where an older one said otherwise.
"""

from __future__ import annotations

from kvtape.backends.proofs.knobs import asked_options, precision_subject
from kvtape.backends.proofs.machine import speed_class
from kvtape.backends.proofs.rows import ProofRow
from kvtape.backends.proofs.store import Proofs, open_proofs
from kvtape.backends.protocol import ModelFacts, SessionConfig

__all__ = ["CHAT", "gate_command", "gate_problem", "gate_row", "gate_subject"]

CHAT = "chat"
"""The workload of `kvtape record --chat`."""


def gate_subject(optimisation: str, workload: str, engine: str, config: SessionConfig) -> str:
    """`deferred-prefill@chat,threads=1`: the cell as text; a KV type that is no base precision stands in it too."""
    knob = precision_subject(engine, config)
    return f"{optimisation}@{workload},threads={config.threads}" + (f",{knob}" if knob is not None else "")


def gate_row(
    optimisation: str,
    engine: str,
    engine_version: str,
    facts: ModelFacts,
    config: SessionConfig,
    *,
    workload: str = CHAT,
    proofs: Proofs | None = None,
) -> ProofRow | None:
    """The newest row for exactly this cell, model, engine version and class of machine; None without one."""
    return (open_proofs() if proofs is None else proofs).newest(
        "gate",
        fingerprint=facts.fingerprint,
        engine=engine,
        engine_version=engine_version,
        machine=speed_class(),
        subject=gate_subject(optimisation, workload, engine, config),
    )


def gate_problem(
    optimisation: str,
    engine: str,
    engine_version: str,
    facts: ModelFacts,
    config: SessionConfig,
    *,
    workload: str = CHAT,
    proofs: Proofs | None = None,
) -> str | None:
    """Why the gate does not let `optimisation` through for a session with this effective configuration; None where it
    does.

    `optimisation`: `deferred-prefill`, `lookup:...` or `draft:...`, canonical.
    """
    row = gate_row(optimisation, engine, engine_version, facts, config, workload=workload, proofs=proofs)
    if row is None:
        how = gate_command(optimisation, engine, facts, config)
        return (
            f"{optimisation} on {workload} has no row of the gate for this model on {engine_version} and this class of "
            "machine; "
            f"ask it with: {how}"
        )
    if row.verdict == "pass":
        return None
    return f"{optimisation} on {workload} was not let through on {row.day}: {row.reason or row.verdict}"


def gate_command(optimisation: str, engine: str, facts: ModelFacts, config: SessionConfig) -> str:
    """The command that would ask the gate for this cell."""
    cell = optimisation.partition(",file=")[0]  # the hash of a draft's file is found by its name
    threads = f" --threads {config.threads}" if config.threads != 1 else ""
    backend, knob = engine, ""
    if precision_subject(engine, config) is not None:
        backend, knob = asked_options(engine, config)
    return f"kvtape gate --model {facts.path} --backend {backend} --cell {cell}{threads}{knob}"
