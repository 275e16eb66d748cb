"""Bailian: chat lineage, ids of 16-token blocks that may be absent, prompts that do not extend the one before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.imports import imported, public_trace, read, refused


def chat(number: int, parent: int = -1, at: float = 0, n: int = 32, ids: list[int] | None = None, **more: Any) -> str:
    ids = list(range(-(-n // 16))) if ids is None else ids
    row = {"chat_id": number, "parent_chat_id": parent, "timestamp": at, "input_length": n, "output_length": 3}
    return json.dumps({**row, "type": "text", "turn": 1, "hash_ids": ids, **more}) + "\n"


def test_the_chats_of_one_root_are_one_session(tmp_path: Path) -> None:
    found = read(tmp_path, chat(5) + chat(9, 7, 2.5) + chat(7, 5, 1) + chat(6, at=3) + chat(8, 4, 4))
    assert found.format == "bailian"
    assert [(r.detail["chat_id"], s) for r, s in zip(found.records, found.sessions, strict=True)] == [
        (5, "chat-5"),
        (7, "chat-5"),
        (9, "chat-5"),
        (6, "chat-6"),
        (8, "chat-4"),
    ]
    assert [r.at_ns for r in found.records] == [0, 10**9, 2_500_000_000, 3 * 10**9, 4 * 10**9]
    assert found.kinds == ["unknown_parent"]


def test_no_ids_are_not_known_instead_of_none(tmp_path: Path) -> None:
    with imported(tmp_path, chat(1, n=17, ids=[]) + chat(2, n=0, ids=[])) as log:
        assert log.sql("SELECT count(*) FROM tokens")[1] == [(0,)]
    assert read(tmp_path, chat(1, n=17, ids=[])).kinds == ["no_block_ids"]


@pytest.mark.parametrize(
    "second", [[0, 1, 2, 9], [0, 1, 3, 3], [0, 2, 2, 3]], ids=["last block differs", "one differs", "middle differs"]
)
def test_a_prompt_that_does_not_extend_is_no_damage(tmp_path: Path, second: list[int]) -> None:
    found = read(tmp_path, chat(1, n=64) + chat(2, 1, at=1, n=64, ids=second))
    assert (found.kinds, list(found.records[1].hashes)) == ([], second)


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        (chat(1, ids=[1]), "hash_ids", "ceil(32/16) is 2"),
        (chat(1, 1), "parent_chat_id", "descends from itself"),
        (chat(1, 2) + chat(2, 1), "parent_chat_id", "descends from itself"),
        (chat(-2), "chat_id", "-2"),
        (chat(1, -2), "parent_chat_id", "-2"),
        (chat(1, turn=1.5), "turn", "float"),
    ],
)
def test_what_is_refused(tmp_path: Path, line: str, field: str, words: str) -> None:
    error = refused(tmp_path, line)
    assert (error.field, words in str(error)) == (field, True)


def test_another_block_size_on_demand(tmp_path: Path) -> None:
    assert read(tmp_path, chat(1, ids=[5]), block_tokens=32).records[0].block_tokens == 32


def test_the_public_shape(tmp_path: Path) -> None:
    found = read(tmp_path, [public_trace("bailian/shape_sample.synthetic.jsonl")])
    assert sorted(set(found.sessions)) == ["chat-0", "chat-159", "chat-3"]
    assert max(r.at_ns for r in found.records) == 70 * 10**9
    assert found.kinds == ["no_block_ids"]
