"""The judge on witnesses made by hand: what planted faults in real engines cannot show one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtape.backends.protocol import KvRows, Witness
from kvtape.backends.reference.model.weights import Weights
from kvtape.planner.layout import Layout, Segment
from kvtape.planner.residency import ResidencyState, apply
from kvtape.replay.findings import Tolerances
from kvtape.replay.judge import Judge, Verdict
from kvtape.replay.lineage import LineageBuilder
from support.oracle import OracleModel, OracleSession
from support.scripted import Script
from support.tiny_gguf import write_tiny

TOKENS = list(range(10, 30))


@dataclass
class Shown:
    """A backend that shows what it is told to."""

    layout: Layout
    seen: Witness

    def books(self) -> Layout:
        return self.layout

    def witness(self) -> Witness:
        return self.seen


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, OracleModel]:
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", request.param, n_head=4, n_head_kv=2, head_dim=32)
    return Weights(path), OracleModel(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, OracleModel]:
    path: Path = write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf")
    return Weights(path), OracleModel(path)


def judge(weights: Weights | None, tokens: list[int] = TOKENS) -> Judge:
    return Judge(weights, np.array(tokens), Tolerances.of(weights="f32", kv_type_k="f32"))


def prefilled(n: int = 20) -> LineageBuilder:
    script = Script()
    script.prefill(TOKENS[:n])
    builder, state = LineageBuilder(), ResidencyState()
    for event in script.events:
        state = apply(state, event)
        row = script.tokens.get(event.seq)
        builder.step(event, state, row.tokens if row else None)
    return builder


def shown(model: OracleModel, tokens: list[int], dtype: Any = np.float32) -> Shown:
    """The oracle's rows of a prefill, as an engine would store them."""
    session = OracleSession(model)
    session.prefill(tokens, 0)
    rows = [session.rows[t] for t in range(len(tokens))]

    def stack(layer: int, keys: bool) -> npt.NDArray[Any]:
        heads = [model.rotate(r.keys[layer], r.cache) if keys else r.values[layer] for r in rows]
        return np.stack([h.ravel() for h in heads]).astype(dtype)

    layers = range(model.n_layer)
    kv = KvRows(tuple(stack(i, True) for i in layers), tuple(stack(i, False) for i in layers))
    return Shown((Segment(0, len(tokens), 0),), Witness(np.arange(len(tokens)), "engine", kv))


def only(verdict: Verdict) -> str:
    assert verdict.findings
    return verdict.findings[0].what


def test_right_rows_are_identified_in_any_storage_order(model: tuple[Weights, OracleModel]) -> None:
    weights, oracle = model
    backend = shown(oracle, TOKENS)
    verdict = judge(weights).look(prefilled(), backend)
    assert verdict == Verdict((), True, 20, 20)
    order = np.random.default_rng(0).permutation(20)
    seen = backend.seen
    rows = KvRows(tuple(k[order] for k in seen.rows.keys), tuple(v[order] for v in seen.rows.values))
    backend.seen = Witness(seen.cache_positions[order], "engine", rows, rows)
    assert judge(weights).look(prefilled(), backend) == Verdict((), True, 20, 20)


def test_a_token_in_another_ones_place(model: tuple[Weights, OracleModel]) -> None:
    weights, oracle = model
    swapped = [TOKENS[1], TOKENS[0], *TOKENS[2:]]
    verdict = judge(weights).look(prefilled(), shown(oracle, swapped))
    assert "2 rows do not hold their token" in only(verdict)
    assert verdict.identified == 18
    assert f"nearest of the session's tokens is {TOKENS[1]}" in only(verdict)


def test_one_layer_with_one_row_less(plain: tuple[Weights, OracleModel]) -> None:
    weights, oracle = plain
    backend = shown(oracle, TOKENS)
    rows = backend.seen.rows
    short = KvRows(rows.keys, (rows.values[0], rows.values[1][:-1]))
    backend.seen = replace(backend.seen, rows=short)
    assert "layer 1 values 19" in only(judge(weights).look(prefilled(), backend))


def test_a_mirror_that_differs_in_one_row(plain: tuple[Weights, OracleModel]) -> None:
    weights, oracle = plain
    backend = shown(oracle, TOKENS)
    rows = backend.seen.rows
    values = rows.values[1].copy()
    values[7, 3] += 1e-3
    backend.seen = replace(backend.seen, mirror=KvRows(rows.keys, (rows.values[0], values)))
    verdict = judge(weights).look(prefilled(), backend)
    assert "layer 1: the engine's values are not those of the mirror" in only(verdict)
    assert verdict.findings[0].found == ((7, 8),)


def test_rows_that_are_not_numbers(plain: tuple[Weights, OracleModel]) -> None:
    weights, oracle = plain
    backend = shown(oracle, TOKENS)
    backend.seen.rows.keys[0][4, 0] = np.nan
    verdict = judge(weights).look(prefilled(), backend)
    assert "1 rows do not hold their token" in only(verdict)


def test_nan_in_a_value_is_never_the_row_that_was(plain: tuple[Weights, OracleModel]) -> None:
    weights, oracle = plain
    backend, looks = shown(oracle, TOKENS), judge(weights)
    backend.seen.rows.values[0][4, 0] = np.nan
    assert not looks.look(prefilled(), backend).findings, "the first sight of a value has nothing to be held against"
    assert "values changed, 1 rows" in only(looks.look(prefilled(), backend))


def test_books_that_differ(plain: tuple[Weights, OracleModel]) -> None:
    weights, oracle = plain
    backend = shown(oracle, TOKENS)
    backend.layout = (Segment(0, 19, 0),)
    assert "books: other tape positions" in only(judge(weights).look(prefilled(), backend))
    backend.layout = (Segment(0, 20, 1),)
    assert "books: other cache positions" in only(judge(weights).look(prefilled(), backend))
    backend.layout = (Segment(0, 10, 10), Segment(10, 10, 0))
    assert "books: rows in another order" in only(judge(weights).look(prefilled(), backend))
    backend.layout = (Segment(0, 10, 0), Segment(5, 10, 10))
    assert "books: not a layout" in only(judge(weights).look(prefilled(), backend))


def test_two_rows_at_one_position(plain: tuple[Weights, OracleModel]) -> None:
    weights, oracle = plain
    backend = shown(oracle, TOKENS)
    positions = backend.seen.cache_positions.copy()
    positions[3] = 2
    backend.seen = replace(backend.seen, cache_positions=positions)
    verdict = judge(weights).look(prefilled(), backend)
    assert not verdict.positions_agree
    assert "witness: 20 rows at cache positions" in only(verdict)


def test_half_precision_rows_pass_with_their_own_tolerance(plain: tuple[Weights, OracleModel]) -> None:
    weights, oracle = plain
    backend = shown(oracle, TOKENS, np.float16)
    half = Judge(weights, np.array(TOKENS), Tolerances.of(weights="f32", kv_type_k="f16"))
    assert half.look(prefilled(), backend) == Verdict((), True, 20, 20)


def test_without_weights_rows_are_compared_but_not_identified(plain: tuple[Weights, OracleModel]) -> None:
    backend, looks = shown(plain[1], TOKENS), judge(None)
    assert looks.look(prefilled(), backend) == Verdict((), True, 20, 0)
    backend.seen.rows.values[1][3, 0] += 1  # the ledger holds the same array, so a copy must be shown
    changed = KvRows(backend.seen.rows.keys, tuple(v.copy() for v in backend.seen.rows.values))
    backend.seen.rows.values[1][3, 0] -= 1
    backend.seen = replace(backend.seen, rows=changed)
    assert "layer 1: values changed" in only(looks.look(prefilled(), backend))
