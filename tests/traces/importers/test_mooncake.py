"""Mooncake: coarse and equal stamps, true duplicates, ids of 64 bits, the rule of the last block."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.traces.importers.source import Source
from kvtape.traces.verify import verify
from support.imports import column, imported, public_trace, read, refused, result_of, written

HIT = """
WITH seen AS (
    SELECT e.at_ns, e.session_id, unnest(from_json(t.hashes, '["VARCHAR"]')) AS block
    FROM tokens t JOIN events e USING (run_id, session_id, seq))
SELECT 1 - count(DISTINCT block) / count(*) FROM seen
"""


def row(stamp: object = 0, n_in: object = 600, n_out: object = 5, ids: object = "[7, 8]") -> str:
    return f'{{"timestamp": {stamp}, "input_length": {n_in}, "output_length": {n_out}, "hash_ids": {ids}}}\n'


def test_a_request_is_open_prompt_generate_close(tmp_path: Path) -> None:
    with imported(tmp_path, row(3000) + row(6000, 512, 0, "[7]")) as log:
        assert result_of(log).format == "mooncake"
        events = log.sql("SELECT session_id, seq, at_ns, op, n_tokens, prompt_tokens, completion_tokens FROM events")[1]
        assert events == [
            ("line-0000001", 0, 0, "open", None, None, None),
            ("line-0000001", 1, 0, "prompt", 600, 600, None),
            ("line-0000001", 2, 0, "generate", 5, None, 5),
            ("line-0000001", 3, 0, "close", None, None, None),
            ("line-0000002", 0, 3_000_000_000, "open", None, None, None),
            ("line-0000002", 1, 3_000_000_000, "prompt", 512, 512, None),
            ("line-0000002", 2, 3_000_000_000, "generate", 0, None, 0),
            ("line-0000002", 3, 3_000_000_000, "close", None, None, None),
        ]
        assert log.default_run().kind == "import"
        assert log.default_run().started_at_ns == 3_000_000_000
        assert column(log, "SELECT hashes FROM tokens") == [
            '["0000000000000007","0000000000000008"]',
            '["0000000000000007"]',
        ]
        assert column(log, "SELECT DISTINCT block_tokens FROM tokens") == [512]
        assert log.state_at(log.default_run().run_id, "line-0000002").closed
    assert verify(tmp_path / "sample.duckdb").ok


def test_what_the_source_does_not_say_is_null(tmp_path: Path) -> None:
    with imported(tmp_path, row()) as log:
        (session,) = log.sessions()
        said = {"run_id", "session_id", "backend", "content"}
        assert {f: getattr(session, f) for f in session.__slots__ if f not in said} == {
            f: None for f in session.__slots__ if f not in said
        }
        for name in ("resident_tokens", "reused", "elapsed_ns", "kv_bytes"):
            assert column(log, f"SELECT DISTINCT {name} FROM events") == [None]


def test_equal_stamps_keep_the_order_of_the_file_and_duplicates_are_kept(tmp_path: Path) -> None:
    data = row(9, n_out=1) + row(3, n_out=2) + row(3, n_out=3) + row(3, n_out=2) + row(0, n_out=4)
    found = read(tmp_path, data)
    assert [r.line for r in found.records] == [5, 2, 3, 4, 1]
    assert (found.duplicates, found.kinds, found.warnings[0].line) == (1, ["duplicate_rows"], 4)


def test_duplicates_are_left_out_when_asked(tmp_path: Path) -> None:
    found = read(tmp_path, row() + row() + row(1), drop_duplicates=True)
    assert ([r.line for r in found.records], found.duplicates) == ([1, 3], 1)


def test_ids_of_64_bits_keep_every_digit(tmp_path: Path) -> None:
    ids = [2**53 + 1, 2**63, 2**64 - 1, 0]
    with imported(tmp_path, row(n_in=2048, ids=json.dumps(ids))) as log:
        query = "SELECT ('0x' || unnest(from_json(hashes, '[\"VARCHAR\"]')))::UBIGINT FROM tokens"
        assert column(log, query) == ids


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        (row(ids="[7, 8.0]"), "hash_ids[1]", "float"),
        (row(ids="[7, NaN]"), None, "NaN"),
        (row(ids="[7, 1e3]"), "hash_ids[1]", "float"),
        (row(ids="[7, -1]"), "hash_ids[1]", "-1"),
        (row(ids=f"[7, {2**64}]"), "hash_ids[1]", "2^64"),
        (row(ids='["7", 8]'), "hash_ids[0]", "str"),
        (row(ids="[true, 8]"), "hash_ids[0]", "bool"),
        (row(ids="[7]"), "hash_ids", "ceil(600/512) is 2"),
        (row(ids="[7, 8, 9]"), "hash_ids", "3 ids for 600 tokens"),
        (row(n_in="600.5"), "input_length", "float"),
        (row(n_in=-600), "input_length", "-600"),
        (row(n_in="null"), "input_length", "null"),
        (row(n_out="NaN"), None, "NaN"),
        (row("-1"), "timestamp", "before 0"),
        (row('"inf"'), "timestamp", "no point in time"),
        (row('"soon"'), "timestamp", "decimal"),
        (row("1e30"), "timestamp", "292 years"),
        ('{"timestamp": 1, "timestamp": 2, "hash_ids": [1]}\n', "timestamp", "twice"),
        ('{"timestamp": 1, "\\u0074imestamp": 2, "hash_ids": [1]}\n', "timestamp", "twice"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n', "hash_ids", "missing"),
        ("[1, 2]\n", None, "object"),
        ('{"timestamp": 1\n', None, "truncated"),
        ("{" * 20_000 + "\n", None, ""),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_imported(tmp_path: Path, line: str, field: str | None, words: str) -> None:
    error = refused(tmp_path, row() + line, format_name="mooncake")
    assert (error.line, error.field) == (2, field)
    assert words in str(error)
    assert str(error).endswith("; nothing was imported")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(1, 5000), st.integers(0, 10**6), st.integers(0, 2**64 - 1)),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_every_request_comes_back(tmp_path_factory, requests, packed, end, final) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("mooncake")
    lines = [row(t, n, o, [h] * -(-n // 512)).strip() for t, n, o, h in requests]
    data = (end.join(lines) + (end if final else "")).encode()
    found = read(folder, gzip.compress(data) if packed else data)
    wanted = [(t * 10**6, line, n, o, [h] * -(-n // 512)) for line, (t, n, o, h) in enumerate(requests, 1)]
    assert [(r.at_ns, r.line, r.input_tokens, r.output_tokens, list(r.hashes)) for r in found.records] == sorted(
        wanted, key=lambda w: w[:2]
    )


def test_packed_or_not_it_is_the_same_run(tmp_path: Path) -> None:
    data = (row() + row(5)).encode()
    for packed, name in ((data, "a"), (gzip.compress(data), "b")):
        with Source(written(tmp_path, packed, name)) as source:
            assert source.digest() == hashlib.sha256(data).hexdigest()


def test_the_public_conversation_trace(tmp_path: Path) -> None:
    with imported(tmp_path, [public_trace("mooncake/conversation_trace.jsonl")]) as log:
        result = result_of(log)
        assert (result.rows, result.sessions, result.duplicates) == (12_031, 12_031, 1)
        assert result.span_ns == 3_536_999 * 10**6
        assert column(log, "SELECT count(DISTINCT at_ns) FROM events") == [1180]
        assert round(column(log, HIT)[0], 3) == 0.366
    assert verify(tmp_path / "sample.duckdb").ok
