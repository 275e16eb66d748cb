"""How far an engine is from `standard`, step by step, in what it predicts: KL, likelihood, first choices, bits.

Both are given the same tokens, so that every step compares two distributions behind the same text. Where those tokens
are `standard`'s own first choices, the first step with another choice is the one at which free generation parts.
What was served and what matched are apart: a step that an engine refused or lost is no step that it got wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtape.backends.logits import log_softmax
from kvtape.backends.protocol import Clock
from kvtape.backends.reference.engines.engine import Contract, EngineInfo, KvEngine, Memory
from kvtape.backends.reference.engines.registry import EngineChoice, make_engine, parse_engine
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.weights import Weights
from kvtape.eval.engine_cases import EngineCase
from kvtape.eval.engine_runs import EngineRun, run_case, warm_up
from kvtape.eval.nll import kl_divergence

__all__ = ["EngineComparison", "EngineTrack", "Step", "row_cosines"]


@dataclass(frozen=True, slots=True)
class Step:
    """One distribution beside that of `standard`. `context`: tokens in front of it; `step` 0 is the prefill's.

    `kl` KL(standard || engine) in nats; `nll_delta`: the next token's negative log likelihood less that under
    `standard`; `same_top`: the same first choice; `overlap`: share of the k most likely tokens in common.
    """

    case: int
    step: int
    context: int
    kl: float
    nll_delta: float
    same_top: bool
    overlap: float
    identical: bool
    difference: float


@dataclass(slots=True)
class EngineTrack:
    """What one engine did with all cases. `asked`: distributions that were asked for, `steps`: those it gave.

    `exact_ns`: what as many steps of `standard` took in the same run. `cosines`: of prompt rows read back, keys and
    values, with those of `standard`; only for engines that promise one.
    `memory`, `stages`, `window_tokens`: of the last case.
    """

    choice: EngineChoice
    info: EngineInfo
    asked: int = 0
    steps: list[Step] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    cosines: list[tuple[float, float]] = field(default_factory=list)
    prompt_tokens: int = 0
    prefill_ns: int = 0
    decode_steps: int = 0
    step_ns: int = 0
    exact_ns: int = 0
    tiles_unpacked: int = 0
    memory: Memory | None = None
    stages: dict[str, int] = field(default_factory=dict)
    window_tokens: int | None = None


class EngineComparison:
    """One track for each choice, in order, that grows by every case. Each runs anew, a `standard` among them too.

    `steps`: decode steps behind each prompt. `top_k`: how many of the most likely tokens are compared.
    """

    def __init__(
        self, weights: Weights, choices: Sequence[EngineChoice], *, steps: int, top_k: int, clock: Clock
    ) -> None:
        self.tracks = [EngineTrack(choice, make_engine(choice).info) for choice in choices]
        self._weights, self._steps, self._top_k, self._clock = weights, steps, top_k, clock
        self._standard = parse_engine("standard")
        self._n_cases = 0

    def add(self, case: EngineCase) -> None:
        """Raises what `standard` raises: there is nothing to compare with then."""
        if not self._n_cases:
            warm_up(self._weights)
        exact = self._run(self._standard, case, case.continuation)
        if exact.problem is not None:
            raise exact.problem
        said = [log_softmax(row) for row in exact.logits]
        for track in self.tracks:
            unpacked = self._weights.report().tiles_unpacked
            run = self._run(track.choice, case, exact.tokens)
            track.tiles_unpacked += self._weights.report().tiles_unpacked - unpacked
            _take_in(track, run, case)
            # Of as many steps as the engine served.
            track.exact_ns += exact.step_ns * max(0, len(run.logits) - 1) // self._steps
            track.steps += _compared(self._n_cases, case, exact, said, run, self._top_k)
            if track.info.contract is Contract.CODEC_BOUNDED and run.logits:
                track.cosines.append(row_cosines(exact, run, len(case.prompt)))
        self._n_cases += 1

    def _run(self, choice: EngineChoice, case: EngineCase, tokens: Sequence[int] | None) -> EngineRun:
        return run_case(choice, self._weights, case, self._steps, self._clock, tokens)


def row_cosines(exact: EngineRun, run: EngineRun, n_rows: int) -> tuple[float, float]:
    """Mean cosine of the first `n_rows` rows of every layer, keys and values, as the two runs read them back.

    A prompt's rows are computed before anything is coded, so they are the very rows that were encoded.
    """
    one, other = exact.harness.engine, run.harness.engine
    assert isinstance(one, KvEngine)
    assert isinstance(other, KvEngine)
    found: list[tuple[float, float]] = []
    for layer in range(exact.harness.weights.architecture.n_layer):
        for position in range(n_rows):
            a, b = one.read_kv_row(layer, position), other.read_kv_row(layer, position)
            assert a is not None
            found.append((0.0, 0.0) if b is None else (_cosine(a[0], b[0]), _cosine(a[1], b[1])))
    keys, values = np.mean(found, axis=0).tolist()
    return keys, values


def _take_in(track: EngineTrack, run: EngineRun, case: EngineCase) -> None:
    engine = run.harness.engine
    track.asked += run.asked
    if run.problem is not None:
        track.problems.append(f"{type(run.problem).__name__}: {run.problem}")
    if run.logits:
        track.prompt_tokens += len(case.prompt)
        track.prefill_ns += run.prefill_ns
        track.decode_steps += len(run.logits) - 1
        track.step_ns += run.step_ns
        track.memory, track.stages = engine.memory(), dict(engine.stage_summary())
        track.window_tokens = engine.window_tokens if isinstance(engine, KvEngine) else None


def _compared(
    number: int,
    case: EngineCase,
    exact: EngineRun,
    said: Sequence[npt.NDArray[np.float64]],
    run: EngineRun,
    top_k: int,
) -> list[Step]:
    steps = []
    for i, logits in enumerate(run.logits):
        p, q, token = said[i], log_softmax(logits), exact.tokens[i]
        steps.append(
            Step(
                case=number,
                step=i,
                context=len(case.prompt) + i,
                kl=kl_divergence(p, q),
                nll_delta=float(p[token] - q[token]),
                same_top=bool(logits.argmax() == exact.logits[i].argmax()),
                overlap=len(_largest(exact.logits[i], top_k) & _largest(logits, top_k)) / min(top_k, len(logits)),
                identical=bool(np.array_equal(logits, exact.logits[i])),
                difference=float(np.abs(logits - exact.logits[i]).max()),
            )
        )
    return steps


def _largest(logits: Floats, k: int) -> set[int]:
    """Ties go to the smaller token."""
    return set(np.argsort(-logits, kind="stable")[:k].tolist()) if k > 1 else {int(logits.argmax())}


def _cosine(a: Floats, b: Floats) -> float:
    one, other = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    scale = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / scale if scale else float(np.array_equal(one, other))
