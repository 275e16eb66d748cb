"""Requests out of trace files, imported logs and recorded sessions: the same blocks, whichever way they come."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import ContextOverflow
from kvtape.backends.session import Session
from kvtape.planner.specs import parse_policy
from kvtape.sim.blocks.block_trace import BlockTrace
from kvtape.sim.blocks.errors import CurveError, NoBlocks
from kvtape.sim.blocks.from_file import read_trace_file
from kvtape.sim.blocks.from_log import read_log
from kvtape.sim.blocks.gathering import Gathering
from kvtape.sim.blocks.identity import by_first_use
from kvtape.sim.blocks.token_blocks import TokenBlocks
from kvtape.traces.importers.errors import SourceRejected
from kvtape.traces.importers.protocol import Asked
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from support.imports import imported, written
from support.logs import KEY, run_row
from support.toys import toy_backend

MOONCAKE = """\
{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [7]}
{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [18446744073709551615, 9223372036854775808]}
{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}
"""
BAILIAN = """\
{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 20, "output_length": 4, "type": "t", "turn": 1, "hash_ids": [1, 2]}
{"chat_id": 9, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 16, "output_length": 4, "type": "t", "turn": 1, "hash_ids": [1]}
{"chat_id": 2, "parent_chat_id": 1, "timestamp": 0.25, "input_length": 40, "output_length": 4, "type": "t", "turn": 2, "hash_ids": [1, 2, 3]}
"""  # noqa: E501
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
KV_EVENTS = '{"ts": 1.0, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 0}\n'


def same(a: BlockTrace, b: BlockTrace) -> bool:
    return (
        a.ids.tolist() == b.ids.tolist()
        and a.tokens.tolist() == b.tokens.tolist()
        and a.starts.tolist() == b.starts.tolist()
        and (a.block_tokens, a.without_blocks) == (b.block_tokens, b.without_blocks)
    )


def test_a_trace_is_read_by_time_and_then_by_line(tmp_path: Path) -> None:
    trace = read_trace_file(written(tmp_path, MOONCAKE, "m.jsonl"))
    assert trace.ids.tolist() == [7, 7, 8, 9, 2**64 - 1, 2**63]
    assert trace.tokens.tolist() == [512, 512, 512, 76, 512, 188]
    assert trace.starts.tolist() == [0, 1, 4, 6]
    assert (trace.block_tokens, trace.without_blocks) == (512, 1)


@pytest.mark.parametrize("data", [MOONCAKE, BAILIAN])
def test_an_imported_log_has_the_requests_of_its_file(tmp_path: Path, data: str) -> None:
    direct = read_trace_file(written(tmp_path, data, "sample.jsonl"))
    with imported(tmp_path, data, "sample") as log:
        assert same(direct, read_log(log))


def test_blocks_of_another_size_are_taken_at_their_word(tmp_path: Path) -> None:
    row = '{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}\n'
    file = written(tmp_path, row, "m.jsonl")
    assert read_trace_file(file, asked=Asked(block_tokens=16)).tokens.tolist() == [16, 16, 8]
    with pytest.raises(SourceRejected, match="--block-tokens"):
        read_trace_file(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (AZURE, "no request in it has block ids.*mooncake"),
        (KV_EVENTS, "what an engine did, not what was asked"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}\n', "no request in it has block ids"),
    ],
)
def test_a_source_that_tells_nothing_of_shared_blocks_is_refused(tmp_path: Path, data: str, message: str) -> None:
    with pytest.raises(NoBlocks, match=message):
        read_trace_file(written(tmp_path, data, "sample"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n', "line 1"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n', "before 0"),
        ('{"timestamp": 0, "input_length": -5, "output_length": 5, "hash_ids": [1]}\n', "not in 0 to"),
        ("hello\n", "no format that kvtape knows"),
    ],
)
def test_bad_traces_are_refused_by_name_and_line(tmp_path: Path, data: str, message: str) -> None:
    with pytest.raises(SourceRejected, match=message):
        read_trace_file(written(tmp_path, data, "sample"))


def test_an_imported_log_without_ids_is_refused(tmp_path: Path) -> None:
    with imported(tmp_path, AZURE, "azure.csv") as log, pytest.raises(NoBlocks, match="no request in it has block ids"):
        read_log(log)


def recorded(path: Path, policy: str = "none") -> tuple[Recorder, Session]:
    recorder = Recorder(path, run_row(), clock=ManualClock(), key=KEY, max_latency_s=0)
    session = Session(
        toy_backend(n_ctx=256, chunk=64), parse_policy(policy), recorder, ManualClock(), run_id="r0", session_id="s0"
    )
    return recorder, session


def blocks_of(prompts: list[list[int]]) -> list[int]:
    blocks = TokenBlocks()
    return by_first_use(np.array([i for p in prompts for i in blocks.ids(p)], np.int64)).tolist()


@pytest.mark.parametrize("policy", ["none", "stream:sink=4,recent=60"])
def test_a_recorded_session_gives_every_prompt_with_all_its_blocks(tmp_path: Path, policy: str) -> None:
    first = [i * 7 % 60 for i in range(100)]
    prompts = [first, [*first[:70], *range(40)], [*first[:64]], [*first[:64], *range(50)]]
    recorder, session = recorded(tmp_path / "l.duckdb", policy)
    generated: list[int] = []
    for prompt in prompts:
        session.ensure_prefix(prompt)
        generated = list(session.decode(5, stop_tokens=frozenset()).tokens)
    prompts.append([*prompts[-1], *generated, 3, 4])
    session.ensure_prefix(prompts[-1])
    session.close()
    recorder.seal()
    with open_log(tmp_path / "l.duckdb") as log:
        trace = read_log(log)
    assert by_first_use(trace.ids).tolist() == blocks_of(prompts)
    assert np.add.reduceat(trace.tokens, trace.starts[:-1]).tolist() == [len(p) for p in prompts]


def test_a_refused_prompt_was_not_admitted_and_a_suffix_has_the_tape_before_it(tmp_path: Path) -> None:
    prompt = [i % 50 for i in range(40)]
    recorder, session = recorded(tmp_path / "l.duckdb")
    session.ensure_prefix(prompt)
    with pytest.raises(ContextOverflow):
        session.ensure_prefix(list(range(60)) * 6)
    session.prefill_suffix([9] * 30)
    session.close()
    recorder.seal()
    with open_log(tmp_path / "l.duckdb") as log:
        trace = read_log(log)
    assert by_first_use(trace.ids).tolist() == blocks_of([prompt, [*prompt, *[9] * 30]])


def test_a_restored_tape_is_the_one_that_was_saved(tmp_path: Path) -> None:
    prompt = [i % 50 for i in range(64)]
    recorder, session = recorded(tmp_path / "l.duckdb")
    session.ensure_prefix(prompt)
    saved = session.snapshot()
    session.ensure_prefix([8] * 64)
    session.restore(saved)
    session.ensure_prefix([*prompt, 1, 2, 3])
    session.close()
    recorder.seal()
    with open_log(tmp_path / "l.duckdb") as log:
        trace = read_log(log)
    assert by_first_use(trace.ids).tolist() == blocks_of([prompt, [8] * 64, [*prompt, 1, 2, 3]])


def test_blocks_of_two_sizes_are_no_budget() -> None:
    found = Gathering("mixed")
    found.add(0, 16, [1], 16)
    with pytest.raises(CurveError, match="blocks of 16 and of 32 tokens"):
        found.add(1, 32, [1], 32)


def test_token_ids_become_one_number_for_each_block_behind_the_same_blocks() -> None:
    blocks = TokenBlocks(2)
    assert blocks.ids([1, 2, 3]) == [1, 2]
    assert blocks.ids([1, 2, 3, 4]) == [1, 3]
    assert blocks.ids([5, 6, 3, 4]) == [4, 5]
    assert blocks.ids([]) == []


def test_a_trace_is_read_and_swept_without_a_database() -> None:
    """Loading one would be a tenth of a second, of the one that a curve of a whole trace takes."""
    modules = "kvtape.sim.blocks.from_file, kvtape.sim.blocks.sweep, kvtape.cli.curve"
    code = f"import sys, {modules}; print(sorted({{'duckdb', 'pyarrow'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "[]\n"
