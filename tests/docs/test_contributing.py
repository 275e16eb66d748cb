"""Whoever does what docs/contributing.md says, step by step, arrives at what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.contributing import PAGE, PARTS, followed


@pytest.mark.parametrize("name", PARTS)
def test_whoever_follows_the_page_arrives(name: str, tmp_path: Path) -> None:
    blocks, texts = followed(name, tmp_path)
    assert len(blocks) >= 5
    for block, text in zip(blocks, texts, strict=True):
        assert text == block.text, "if that is right, write it anew: python docs/write_outputs.py docs/contributing.md"


def test_steps_are_as_many_as_the_heading_says() -> None:
    numbers = {"three": 3, "four": 4, "five": 5}
    parts = re.findall(r"^## [^\n]* in (\w+) steps\n(.*?)(?=^## )", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(parts) == len(PARTS)
    for word, text in parts:
        assert [int(n) for n in re.findall(r"^\*\*(\d)\. ", text, re.MULTILINE)] == [*range(1, numbers[word] + 1)]
