"""Surrogate tokens keep which prompts begin alike, and an imported trace runs through a real Session with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import open_toy
from kvtape.testing.toy_model import N_VOCAB
from kvtape.traces.exporters.requests import PromptRequest, prompt_requests
from kvtape.traces.surrogates import block_tokens_of, surrogate_prompt
from support.imports import imported
from support.logs import TickClock

ALLOWED = range(3, 1000)


def request(hashes: list[int] | None, n: int, size: int = 16, seq: int = 1) -> PromptRequest:
    return PromptRequest("s", 1, seq, 0, n, None, None if hashes is None else tuple(hashes), size, {})


@given(st.integers(0, 2**64 - 1), st.integers(0, 40), st.integers(1, 50))
def test_a_block_is_its_hash_and_nothing_else(block: int, n: int, vocabulary: int) -> None:
    allowed = range(7, 7 + vocabulary)
    tokens = block_tokens_of(block, n, allowed)
    assert (tokens.dtype, tokens.shape, set(tokens.tolist()) <= set(allowed)) == (np.int64, (n,), True)
    assert tokens.tolist() == block_tokens_of(block, n + 5, allowed)[:n].tolist()


def test_the_draw_is_spread_and_stays_what_it_is() -> None:
    """The generator of the reference implementation, seeded with 1234567: its first three numbers."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert block_tokens_of(1234567, 3, range(10_007)).tolist() == [z % 10_007 for z in known]
    counts = np.bincount(np.concatenate([block_tokens_of(b, 64, range(100)) for b in range(500)]), minlength=100)
    assert counts.min() > 200
    with pytest.raises(ValueError, match="no token ids"):
        block_tokens_of(1, 1, [])


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6, unique=True),
    st.integers(0, 6),
    st.integers(1, 16),
    st.integers(1, 16),
)
def test_prompts_begin_alike_as_far_as_their_blocks_do(
    blocks: list[int], shared: int, tail: int, other_tail: int
) -> None:
    shared = min(shared, len(blocks))
    other = [*blocks[:shared], *(b ^ 1 for b in blocks[shared:])]
    a = surrogate_prompt(request(blocks, 16 * (len(blocks) - 1) + tail), ALLOWED)
    b = surrogate_prompt(request(other, 16 * (len(other) - 1) + other_tail, seq=2), ALLOWED)
    n = min(len(a), len(b), 16 * shared)
    assert a[:n].tolist() == b[:n].tolist()
    if shared < len(blocks) and min(len(a), len(b)) >= 16 * shared + 8:
        assert a[16 * shared :][:8].tolist() != b[16 * shared :][:8].tolist()


def test_what_no_block_tells_is_the_requests_own() -> None:
    floor = [surrogate_prompt(request([5], 30, seq=seq), ALLOWED) for seq in (1, 2)]
    assert floor[0][:16].tolist() == floor[1][:16].tolist()
    assert floor[0][16:].tolist() != floor[1][16:].tolist()
    assert len(surrogate_prompt(request(None, 9), ALLOWED)) == 9


def test_an_imported_chat_runs_through_a_session_and_reuses_what_its_blocks_say(tmp_path: Path) -> None:
    rows = []
    for turn, (n, ids) in enumerate([(40, [1, 2, 3]), (60, [1, 2, 4, 5]), (70, [1, 2, 4, 6, 7])]):
        row = {"chat_id": turn, "parent_chat_id": turn - 1, "timestamp": turn, "input_length": n, "output_length": 4}
        rows.append(json.dumps({**row, "type": "text", "turn": turn + 1, "hash_ids": ids}))
    with imported(tmp_path, "\n".join(rows)) as log:
        requests = prompt_requests(log, log.default_run().run_id)
    assert [r.session_id for r in requests] == ["chat-0"] * 3
    with Session(
        open_toy(SessionConfig(n_ctx=128, chunk=32)),
        parse_policy("none"),
        ListSink(),
        TickClock(),
        run_id="r",
        session_id="s",
    ) as session:
        reused = []
        for r in requests:
            reused.append(session.ensure_prefix(surrogate_prompt(r, range(N_VOCAB)).tolist()).reused)
            session.decode(r.output_tokens or 0)
    assert reused[0] == 0
    for got, blocks in zip(reused[1:], (2, 3), strict=True):
        assert 16 * blocks <= got <= 16 * blocks + 3
