"""Logs recorded by the command line on a tiny model."""

from __future__ import annotations

from pathlib import Path

from support.command import Ran, kvtape

__all__ = ["POLICY", "TEXT", "record"]

POLICY = "stream:sink=4,recent=60"
TEXT = "A cache is a promise about the future, made with the past as its only witness. " * 5


def record(model: Path, log: Path, *more: object, text: str = TEXT) -> Ran:
    """`kvtape record` of a text that is longer than its context of 256, so that the policy evicts."""
    source = log.with_suffix(".txt")
    source.write_text(text, encoding="utf-8")
    options = ["--n-ctx", 256, "--chunk", 64, "--decode", 12, "--policy", POLICY, "--cold-tokens", 128]
    return kvtape("record", "--model", model, "--text", source, "--log", log, *options, *more)
