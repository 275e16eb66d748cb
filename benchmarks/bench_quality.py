"""Does retained attention mass tell which policy hurts? Predicted from a dense log, measured by KL and likelihood.

For each text one dense pass of the demo model is recorded with the attention of every query. From that log alone every
policy and budget is simulated, which gives 1 - retained mass. The same policies stream through the same text on the
engine, one token at a time beside dense attention, which gives the mean KL and what a token's likelihood lost, and what
they kept. Rank correlations over all policy-budget pairs that evict, of each text and of the means over texts, with
bootstrap intervals; and how far a scored policy kept, live, what its simulation keeps.

`python benchmarks/bench_quality.py` takes one text at two budgets, some minutes; `--full` all at all budgets, half
an hour on one core. `--rows rows.jsonl` keeps what was measured, `--from rows.jsonl` only prints the table again.
Exits 1 when Spearman's correlation with the mean KL is below 0.5.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ranks import interval, kendall, spearman

from kvtape.backends.clock import MonotonicClock, StoppableClock
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.backends.session import Session
from kvtape.backends.shadow import open_shadow
from kvtape.cli.logs import opened
from kvtape.cli.models import demo_model
from kvtape.cli.recording import recording, run_row
from kvtape.eval.candidates import Candidate, candidates_of
from kvtape.eval.nll import NllTask, run_nll
from kvtape.eval.targets import NullSink, Target, World
from kvtape.eval.texts import long_text, tokens_of
from kvtape.planner.events import Event
from kvtape.planner.specs import parse_policy
from kvtape.sim.costs.roofline import roofline_costs
from kvtape.sim.quality.agreement import agreement
from kvtape.sim.quality.attaching import with_attention
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.running import simulate
from kvtape.sim.world.script import Script
from kvtape.sim.world.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
POLICIES = (
    "stream:sink=4,block=8",
    "stream:sink=0,block=8",
    "class:sink=4,block=8",
    "random:sink=4,recent=32,seed=0,block=8",
    "random:recent=32,seed=0,block=8",
    "h2o:sink=4,recent=32,block=8",
    "h2o:sink=4,recent=32,norm=mean,block=8",
    "snapkv:sink=4,block=8",
    "tova:sink=4,recent=32,block=8",
)
"""Blocks of 8, so that beside sinks and 32 recent tokens even the smallest budget has something to choose."""

BUDGETS = (64, 128, 256)
N_CTX = {64: 256, 128: 256, 256: 512}
"""The context in which a budget is tried, which the engine pads to 256s; `stream` fills it before it plans."""

COSTS = roofline_costs(
    "flops=1e11,bytes_per_s=2e10,params=1.35e8,weight_bytes=1e8,row_bytes=23040", machine=None, kvtape_version="-"
)


def texts(engine: Engine, n_tokens: int) -> dict[str, tuple[int, ...]]:
    """An essay, made-up sentences, and the code of a planner, `n_tokens` tokens each."""
    essay = (ROOT / "cli" / "text" / "essay.txt").read_text(encoding="utf-8")
    code = (ROOT / "planner" / "layout.py").read_text(encoding="utf-8")
    return {
        "essay": tokens_of(engine.tokenize, essay, n_tokens),
        "sentences": long_text(engine.tokenize, 0, n_tokens),
        "code": tokens_of(engine.tokenize, code, n_tokens),
    }


def dense_script(engine: Engine, tokens: Sequence[int], config: SessionConfig) -> Script:
    """The text through a dense session, one token at a time, as a log with the attention of every query has it."""
    clock = StoppableClock(MonotonicClock())
    row = run_row("live", {"verb": "bench"}, {engine.name: engine.version}, 0)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "dense.duckdb"
        with recording(log, row, clock) as recorder:
            shadow = open_shadow(engine, config, clock, tokens=len(tokens), every=1)
            kv = engine.open(config)
            policy = parse_policy("none:block=8")
            with Session(
                kv, policy, recorder, clock, run_id=row.run_id, session_id="text", content=True, shadow=shadow
            ) as session:
                session.ensure_prefix(tokens[:1])
                rest = iter(tokens[1:])
                session.decode(len(tokens) - 1, choose=lambda _: next(rest, None), stop_tokens=frozenset())
        with opened(log) as tape:
            (script,) = with_attention(read_scripts(tape), tape)
    assert script.attention is not None, script.no_attention
    return script


class ByTape(NullSink):
    """The events of each session."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}

    def see(self, event: Event) -> None:
        self.events.setdefault(event.session_id, []).append(event)


def predicted(script: Script, candidate: Candidate, n_ctx: int, live: Sequence[Event]) -> dict[str, Any]:
    sink = ByTape()
    settings = Settings(policy=candidate.policy.canonical, n_ctx=n_ctx, arrivals="closed")
    figures = simulate([script], settings, COSTS, sinks=[sink]).figures
    agreed = agreement(live, sink.events["text"])
    return {
        "agreement": agreed.mean,
        "same_first": agreed.equal,
        "lost": 1 - figures["retained_mass"],
        "lost_low": 1 - figures["retained_mass_high"],
        "lost_opt": 1 - figures["opt_retained_mass"],
        "evicted": figures["evicted_tokens"],
        "cut_short": figures["cut_short"],
    }


def measure(backend: str, n_tokens: int, budgets: Sequence[int], only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row for each text, policy and budget."""
    name, _, _ = backend.partition(":")
    engine = open_engine(name, demo_model(), {"scores": "on"})
    config = SessionConfig(n_ctx=n_tokens, chunk=512, threads=1, options={"scores": "on"})
    try:
        for text, tokens in texts(engine, n_tokens).items():
            if only and text not in only:
                continue
            script = dense_script(engine, tokens, config)
            for budget in budgets:
                candidates = [c.settled(0) for c in candidates_of(POLICIES, [budget])]
                task = NllTask(tokens, N_CTX[budget])
                sink = ByTape()
                world = World(sink, MonotonicClock(), "bench")
                dense, *tracks = run_nll(task, Target(backend, engine, replace(config)), 0, candidates, world)
                for i, track in enumerate(tracks):
                    live = sink.events[f"{engine.name}-0-text-{i + 1}"]
                    yield {
                        "backend": name,
                        "text": text,
                        "policy": track.candidate.label,
                        "asked": POLICIES[i],
                        "budget": budget,
                        **predicted(script, track.candidate, track.n_ctx, live),
                        "kl": float(np.mean(track.kl)),
                        "excess": float(np.mean(np.subtract(track.nll, dense.nll))),
                        "tokens": n_tokens,
                    }
    finally:
        engine.close()


def correlations(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one row for each pair: Spearman's and Kendall's with KL and with the likelihood, 95 % intervals."""
    lost = np.array([r["lost"] for r in rows])
    found: dict[str, Any] = {"pairs": len(rows)}
    for figure in ("kl", "excess"):
        other = np.array([r[figure] for r in rows])
        for name, of in (("spearman", spearman), ("kendall", kendall)):
            found[f"{name}_{figure}"] = round(of(lost, other), 3)
            found[f"{name}_{figure}_95"] = [round(v, 3) for v in interval(of, lost, other)]
    return found


def over_texts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each policy and budget: the means over the texts, each text counted alike."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["asked"], row["budget"]), []).append(row)
    figures = ("lost", "lost_low", "lost_opt", "kl", "excess", "agreement")
    return [
        {"asked": asked, "budget": budget} | {f: float(np.mean([r[f] for r in group])) for f in figures}
        for (asked, budget), group in groups.items()
    ]


def discordant(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where the prediction is plainly wrong: a pair loses less mass by 0.01 or more, and its KL is a tenth higher."""
    found = []
    for a in sorted(rows, key=lambda r: float(r["lost"])):
        worse = [b for b in rows if a["lost"] + 0.01 <= b["lost"] and a["kl"] > 1.1 * b["kl"]]
        if worse:
            names = ", ".join(f"{b['asked']} {b['budget']} ({b['lost']:.3f}, {b['kl']:.3f})" for b in worse)
            found.append(f"{a['asked']} {a['budget']} ({a['lost']:.3f}, {a['kl']:.3f}) before {names}")
    return found


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The pairs, the one that loses least mass first."""
    lines = [
        "| policy | budget | mass lost | at best | mean KL | NLL over dense | kept alike |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda r: float(r["lost"])):
        span = f"{r['lost']:.4f}" if r["lost"] - r["lost_low"] < 5e-5 else f"{r['lost_low']:.4f} to {r['lost']:.4f}"
        lines.append(
            f"| `{r['asked']}` | {r['budget']} | {span} | {r['lost_opt']:.4f} | {r['kl']:.3f} | {r['excess']:+.3f} "
            f"| {r['agreement']:.3f} |"
        )
    return lines


def main() -> int:
    """Exit 1 when the prediction is not worth its name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="llama:scores=on")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--budget", type=int, action="append")
    parser.add_argument("--text", action="append")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--from", dest="source", type=Path)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if asked.source is not None:
        rows = [json.loads(line) for line in asked.source.read_text(encoding="utf-8").splitlines()]
    else:
        tokens = asked.tokens or (512 if asked.full else 384)
        budgets = asked.budget or (BUDGETS if asked.full else BUDGETS[:2])
        only = asked.text or ([] if asked.full else ["code"])
        for row in measure(asked.backend, tokens, budgets, only):
            rows.append(row)
            if asked.rows is not None:
                with asked.rows.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row, sort_keys=True) + "\n")
    # What evicted nothing lost nothing, in both columns: that proves nothing.
    rows = [r for r in rows if r["evicted"]]
    means = over_texts(rows)
    print("\n".join(markdown(means)))
    for text in dict.fromkeys(r["text"] for r in rows):
        print(json.dumps({"text": text} | correlations([r for r in rows if r["text"] == text])))
    for budget in sorted({r["budget"] for r in means}):
        print(json.dumps({"budget": budget} | correlations([r for r in means if r["budget"] == budget])))
    total = correlations(means)
    print(json.dumps({"text": "means over texts"} | total))
    print("\n".join(["plainly wrong (mass lost, KL):", *discordant(means)]))
    return 0 if total["spearman_kl"] >= 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
