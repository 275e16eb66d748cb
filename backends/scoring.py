"""Asking the engine what its queries attended to, as a policy wants it measured, and putting it on blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from kvtape.backends.carried import taken
from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.feasible import require_clairvoyant
from kvtape.backends.parts import Parts
from kvtape.backends.protocol import AttentionMass
from kvtape.planner.blocks import Block
from kvtape.planner.events import Op
from kvtape.planner.rows import ScoreRow
from kvtape.planner.scores import ScoreRequest, pool_scores, score_blocks, sum_blocks, sum_layers
from kvtape.planner.specs import PolicySpec

__all__ = ["finite", "follow", "probe", "score_rows", "scored"]


def scored(parts: Parts, blocks: Sequence[Block]) -> Sequence[Block]:
    """All resident `blocks` with the scores that the policy asks for; as they are where it asks for or gets none.

    A `score` event says what was measured. A probe is not made here: its tokens come from the caller (`probe`).
    """
    request = parts.policy.score_request
    if request is None or not parts.capabilities.attention_scores:
        return blocks
    if request.kind == "probe":
        return blocks if parts.probed is None else _on_blocks(parts, blocks, request, parts.probed)
    began = parts.now()
    try:
        measured = finite(_measured(parts, request))
    except UnsupportedOperation as err:
        # The plan then goes without scores and says so; why is on record.
        parts.journal.emit(Op.REFUSE, began, error_class=type(err).__name__, reason=f"score: {err}")
        return blocks
    _record(parts, request.kind, measured, began, blocks)
    return _on_blocks(parts, blocks, request, measured)


def probe(parts: Parts, tokens: Sequence[int]) -> AttentionMass:
    """Measure what `tokens` would attend to behind the tape; kept for plans that want a probe, until the tape grows."""
    blocks = parts.catalog.resident(parts.state.resident)
    began = parts.now()
    request = parts.policy.score_request
    layers = request.layers if request is not None and request.kind == "probe" else None
    measured = finite(parts.backend.score(tokens, len(parts.tape), layers))
    _record(parts, "probe", measured, began, blocks)
    parts.probed = measured
    return measured


def follow(parts: Parts, policy: PolicySpec) -> None:
    """Before the policy changes: a probe that measured chosen layers says nothing of others."""
    before, after = parts.policy.score_request, policy.score_request
    if before is None or before.kind != "probe" or before.layers is None:
        return
    if after is None or after.layers != before.layers:
        parts.probed = None


def finite(measured: AttentionMass) -> AttentionMass:
    """`measured` as it is. Raises UnsupportedOperation where it has numbers that are none."""
    if not (np.isfinite(measured.mass).all() and np.isfinite(measured.peak).all()):
        raise UnsupportedOperation("score", "what the engine computed as attention is not finite")
    return measured


def _measured(parts: Parts, request: ScoreRequest) -> AttentionMass:
    if request.kind == "accumulated":
        return taken(parts)
    if request.kind == "later":
        return require_clairvoyant(parts.backend).later_mass()
    return _window(parts, request)


def _window(parts: Parts, request: ScoreRequest) -> AttentionMass:
    """The last tokens' queries; further left where the engine cannot compute right behind a hole."""
    queries = min(request.queries or 1, len(parts.tape) - 1)
    start = len(parts.tape) - queries
    layout = parts.state.layout
    home = next((s for s in layout if s.tape_start <= start < s.tape_stop), None)
    if home is None:
        raise UnsupportedOperation("score", f"the last {queries} tokens are not all resident")
    if start == home.tape_start and start > 0:
        # Right behind a hole there is no row for the engine to go on from.
        start += 1
    return parts.backend.score(parts.tape[start:], start, request.layers)


def _on_blocks(
    parts: Parts, blocks: Sequence[Block], request: ScoreRequest, measured: AttentionMass
) -> Sequence[Block]:
    positions = np.asarray(measured.tape_positions)
    rows = measured.peak if request.heads == "max" else measured.mass
    tokens = sum_layers(rows, measured.layers, request.wanted(measured.layers))
    if request.kind == "accumulated":
        parts.history = parts.history.add(positions, tokens, measured.n_queries, len(parts.tape))
        tokens = parts.history.scores(positions, parts.policy.norm)
    return score_blocks(blocks, positions, pool_scores(tokens, parts.policy.pool))


def _record(parts: Parts, kind: str, measured: AttentionMass, began: int, blocks: Sequence[Block]) -> None:
    parts.journal.emit(
        Op.SCORE,
        began,
        n_tokens=len(measured.tape_positions),
        reason=kind,
        elapsed_ns=parts.now() - began,
        detail=json.dumps({"layers": list(measured.layers), "queries": measured.n_queries}),
        score_rows=score_rows(parts, measured, blocks),
    )


def score_rows(parts: Parts, measured: AttentionMass, blocks: Sequence[Block]) -> list[ScoreRow]:
    """One row of the next event for each block of which a token was measured; what was not measured has none."""
    if not blocks:
        return []
    both = np.stack((measured.mass, measured.peak)).astype(np.float64)
    sums, counts = sum_blocks(blocks, np.asarray(measured.tape_positions), both)
    mass, peak = sums.astype(np.float32).transpose(0, 2, 1).tolist()
    return [
        ScoreRow(
            run_id=parts.journal.run_id,
            session_id=parts.journal.session_id,
            seq=parts.journal.next_seq,
            block_id=block.block_id,
            generation=parts.state.generation,
            start=block.start,
            stop=block.stop,
            mass=tuple(mass[i]),
            peak=tuple(peak[i]),
        )
        for i, block in enumerate(blocks)
        if counts[i]
    ]
