"""A cell of the gate: one optimisation on one workload, with the sessions that differ in nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtape.backends.proofs.gates import gate_subject
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.eval.gate.arms import Arm
from kvtape.eval.gate.workloads import Workload
from kvtape.eval.targets import Target, World
from kvtape.planner.specs import parse_policy

__all__ = ["Cell", "CellArms", "Optimisation"]


@dataclass(frozen=True, slots=True)
class Optimisation:
    """What is switched on. `name` is canonical: `deferred-prefill`, `lookup:...`, `draft:...`.

    `counters`: those of a session that count how often it came into play; `session`: what `Session` is given for it.
    """

    name: str
    counters: tuple[str, ...]
    session: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    optimisation: Optimisation
    workload: Workload

    def subject(self, engine: str, config: SessionConfig) -> str:
        """As its row of the gate is found by; `config` is the effective one."""
        return gate_subject(self.optimisation.name, self.workload.name, engine, config)


@dataclass(slots=True)
class CellArms:
    """`Arms` of a cell on a loaded engine: sessions of policy `none` in a context that holds every conversation.

    `prefix` keeps the sessions of one log apart.
    """

    cell: Cell
    target: Target
    world: World
    n_ctx: int
    prefix: str = ""

    def open(self, arm: Arm, session_id: str) -> Session:
        extra = self.cell.optimisation.session if arm == "optimised" else {}
        return self.world.session(
            self.target, parse_policy("none"), f"{self.prefix}{session_id}", self.n_ctx, extra=extra
        )

    def used(self, session: Session) -> int:
        counters = session.explain().counters
        return sum(counters[name] for name in self.cell.optimisation.counters)
