"""One soak of a server: a load, faults, and what is held against it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvtape.backends.protocol import SessionConfig
from kvtape.backends.registry import open_engine
from support.serve_checks import Alone, findings, logged_turns, memory, missing, percentiles
from support.serve_faults import FAULTS, Supervised, plan_faults, why_not_slow
from support.serve_load import Conversation, Load, Told, conversations
from support.server_process import free_port, start_bare, start_kvtape

__all__ = ["Soak"]

_NAME = "served"
_LONG_TAIL = 150.0
"""Turns of the second half of a life; a shorter one is still warming up."""


@dataclass(frozen=True, slots=True)
class Soak:
    """`tie`: see `Alone.compare`. `faults`: how many; `leave`: share of turns that a client leaves first.

    `most_kib_per_turn`: what resident memory may grow by in the second half of a long life; what the log has not
    sealed yet is a part of it. The log holds content, so that answers can be looked up.
    """

    model: Path
    backend: str
    talks: int
    turns: int
    clients: int
    slots: int
    max_tokens: int
    n_ctx: int
    seed: int
    tie: float
    faults: int = 0
    leave: float = 0.0
    most_kib_per_turn: float = 24.0
    kinds: Sequence[str] = FAULTS

    def run(self, folder: Path) -> dict[str, Any]:
        """The report; `wrong` has a line for each thing that must not be."""
        log = folder / "tapes"
        plan = plan_faults(self.seed, self.faults, self.talks * self.turns, self._kinds())
        with Supervised(partial(self._start, log, free_port()), log, plan) as server:
            load = Load(
                lambda: server.server.url, _NAME, self.max_tokens, self.seed, self.leave, on_turn=server.turn_ended
            )
            told = load.run(self._conversations(), self.clients)
        wrong = list(server.wrong)
        report: dict[str, Any] = {
            "engine": self.backend,
            "model": self.model.name,
            "conversations": self.talks,
            "clients": self.clients,
            "slots": self.slots,
            "seed": self.seed,
            "answers": len(told),
            "faults": dict(sorted(server.done.items())),
            "end_s": dict(sorted(server.ends.items())),
            "slow_fsyncs": server.slow_calls,
            "failures": dict(sorted(load.failures.items())),
            "starts": len(server.rss),
            **self._held_against(log, told, wrong),
            **memory(server.rss),
            **_times(told),
        }
        wrong += self.grown(report)
        if plan:
            wrong.append(f"faults that did not strike: {sorted(plan.values())}")
        return report | {"wrong": wrong}

    def bare(self, folder: Path, needs: Path | None) -> dict[str, Any]:
        """The same load, without faults, on llama-cpp-python's server."""
        server = start_bare(self.model, needs, folder / "bare.err", n_ctx=self.n_ctx, name=_NAME)
        try:
            load = Load(lambda: server.url, _NAME, self.max_tokens, self.seed, usage_in_stream=False)
            told = load.run(self._conversations(), self.clients)
            rss = round(server.rss_bytes() / (1 << 20), 1)
        finally:
            server.stop()
        return {
            "answers": len(told),
            "failures": dict(sorted(load.failures.items())),
            "rss_mib_end": rss,
            **_times(told),
        }

    def grown(self, report: dict[str, Any]) -> list[str]:
        """What is wrong with the memory of a server that had no faults and lived for long enough to say."""
        kib = report["rss_kib_per_turn"]
        judged = not self.faults and report["turns_of_tail"] >= _LONG_TAIL
        return [f"memory grows by {kib} KiB a turn"] if judged and kib > self.most_kib_per_turn else []

    # -- steps ----------------------------------------------------------------------------------------------------

    def _start(self, log: Path, port: int) -> Any:
        more = ["--backend", self.backend, "--content", "--slots", str(self.slots), "--n-ctx", str(self.n_ctx)]
        isolated = ["--isolate"] if "host_killed" in self._kinds() and self.faults else []
        return start_kvtape(self.model, log, *more, *isolated, name=_NAME, port=port)

    def _kinds(self) -> list[str]:
        return [k for k in self.kinds if k != "disk_slow" or why_not_slow() is None]

    def _conversations(self) -> list[Conversation]:
        return conversations(self.talks, self.turns, self.seed)

    def _held_against(self, log: Path, told: Sequence[Told], wrong: list[str]) -> dict[str, Any]:
        engine = open_engine(self.backend, self.model)
        try:
            logged = logged_turns(log, engine.detokenize, engine.facts.end_tokens)
        finally:
            engine.close()
        lost = missing(told, logged)
        wrong += [f"not in the log: {line}" for line in lost]
        wrong += [f"verify: {line}" for line in findings(log)]
        alone = Alone(self.model, self.backend, SessionConfig(n_ctx=self.n_ctx), self.max_tokens, logged)
        alone.compare(told, self.tie)
        wrong += [f"not what it says alone: {line}" for line in alone.different]
        return {
            "turns_in_log": sum(map(len, logged.values())),
            "lost": len(lost),
            "as_alone": alone.equal,
            "near_ties": alone.near_ties,
            "different": len(alone.different),
            "calm": sum(t.calm for t in told),
        }


def _times(told: Sequence[Told]) -> dict[str, Any]:
    return {"ttft_s": percentiles([t.ttft_s for t in told]), "turn_s": percentiles([t.turn_s for t in told])}
