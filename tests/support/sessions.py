"""Random legal sessions, and how a session's events are carried out on the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvtape.planner.events import Event, Op, Way
from kvtape.planner.layout import rank_layout
from kvtape.planner.residency import IllegalEvent, ResidencyState, apply
from kvtape.planner.rows import TokensRow
from support.oracle import OracleModel, OracleRow, OracleSession
from support.scripted import Script

__all__ = ["play_on_oracle", "random_scripts", "script_of"]

STEPS = (
    "prefill",
    "decode",
    "gap",
    "cold",
    "rebased",
    "recompute",
    "admit",
    "append",
    "refill",
    "truncate",
    "cut",
    "snapshot",
    "restore",
)
Step = tuple[str, int, int]


def random_scripts(n_vocab: int, max_steps: int = 14) -> st.SearchStrategy[Script]:
    """Sessions of at most a few dozen tokens that mix every way to change residency."""
    step = st.tuples(st.sampled_from(STEPS), st.integers(0, 10_000), st.integers(0, 10_000))
    return st.lists(step, min_size=2, max_size=max_steps).map(lambda steps: script_of(steps, n_vocab))


def script_of(steps: list[Step], n_vocab: int) -> Script:
    """The session that `steps` describe; a step that is impossible where it stands is left out."""
    script = Script()
    script.prefill(_draw(6, 0, n_vocab))
    for kind, a, b in steps:
        _take(script, kind, a, b, n_vocab)
    script.prefill(_draw(2, 1, n_vocab))
    return script


def _draw(n: int, seed: int, n_vocab: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, n_vocab, n)]


def _take(script: Script, kind: str, a: int, b: int, n_vocab: int) -> None:
    state = script.state
    if kind == "prefill":
        script.prefill(_draw(1 + a % 9, b, n_vocab))
    elif kind == "decode":
        script.decode(_draw(1 + a % 4, b, n_vocab))
    elif kind in ("gap", "cold", "rebased", "recompute"):
        way = {"rebased": Way.REBASED, "recompute": Way.RECOMPUTE}.get(kind, Way.GAP)
        segment = state.layout[a % len(state.layout)] if state.layout else None
        if segment is not None and state.resident_tokens > segment.length - b % segment.length:
            start = segment.tape_start + b % segment.length
            stop = start + 1 + (a + b) % (segment.tape_stop - start)
            if stop - start < state.resident_tokens:
                script.evict(start, stop, cold=kind == "cold" or b % 2 == 0, way=way)
    elif kind in ("admit", "append") and state.cold:
        _if_legal(lambda: script.admit(state.cold[a % len(state.cold)].block_id, append=kind == "append"))
    elif kind == "refill":
        for left in state.layout:
            hole = next((r for r in state.dropped if r.start == left.tape_stop), None)
            if hole is not None:
                _if_legal(lambda s=hole.start, e=hole.stop, c=left.cache_stop: script.refill(s, e, c))
                return
    elif kind in ("truncate", "cut") and state.tape_length:
        way = Way.RECOMPUTE if kind == "cut" else Way.GAP
        script.truncate(1 + a % state.tape_length, way=way)
    elif kind == "snapshot":
        script.snapshot()
    elif kind == "restore" and state.snapshots:
        script.restore(a % len(state.snapshots))


def _if_legal(act: Callable[[], None]) -> None:
    with contextlib.suppress(IllegalEvent):
        act()


def play_on_oracle(
    events: list[Event], tokens: dict[int, TokensRow], model: OracleModel, *, recompute: bool = False
) -> dict[tuple[int, int], npt.NDArray[np.float64]]:
    """Logits by (seq, tokens done) of every prefill and decode, with the rows of the oracle after every event checked
    against the fold. `recompute` rebuilds the cache for every evict, admit and refill."""
    oracle = OracleSession(model)
    tape: list[int] = []
    saved: dict[int, tuple[list[int], dict[int, OracleRow]]] = {}
    cold: dict[int, list[OracleRow]] = {}
    state = ResidencyState()
    out: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
    for event in events:
        state = apply(state, event)
        start, stop, at = event.start or 0, event.stop or 0, event.cache_start or 0
        if event.op in (Op.PREFILL, Op.DECODE):
            tape += tokens[event.seq].tokens or ()
            for k, logits in enumerate(oracle.prefill(tape[start:], start)):
                out[event.seq, k + 1] = logits
        elif event.op == Op.TRUNCATE:
            del tape[start:]
            oracle.truncate(start)
        elif event.op == Op.EVICT:
            rows = oracle.evict(start, stop)
            for ref in event.blocks or ():
                cold[ref.block_id] = [rows[t - start] for t in range(ref.start, ref.stop)]
        elif event.op == Op.SHIFT and not recompute:
            oracle.shift(start, stop, event.delta or 0)
        elif event.op == Op.ADMIT and not recompute:
            oracle.admit(cold[event.block_id or 0], start, at)
        elif event.op == Op.RECOMPUTE and not recompute:
            oracle.refill(tape[start:stop], start, at)
        elif event.op == Op.SNAPSHOT:
            saved[event.snapshot_id or 0] = (list(tape), oracle.snapshot())
        elif event.op == Op.RESTORE:
            kept, rows_by_tape = saved[event.snapshot_id or 0]
            tape = list(kept)
            oracle.restore(rows_by_tape)
        anew = event.op in (Op.EVICT, Op.ADMIT, Op.RECOMPUTE) and recompute
        if anew or (event.op in (Op.EVICT, Op.TRUNCATE) and event.way == Way.RECOMPUTE):
            pairs = state.resident.as_pairs()
            oracle.rebuild(pairs, [t for s, e in pairs for t in tape[s:e]])
        layout = rank_layout(state.resident) if recompute else state.layout
        want = {s.tape_start + i: s.cache_start + i for s in layout for i in range(s.length)}
        assert {t: row.cache for t, row in oracle.rows.items()} == want, event
    return out
