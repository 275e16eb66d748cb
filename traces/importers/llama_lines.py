"""One line of a llama-server log as a fact: what kind, of which slot, with which numbers, when.

The same fact has had many wordings since 2024; the table below has one row for each kind. Lines come bare, dated in
four ways (minutes.seconds.ms.us, ISO 8601, unix seconds, not at all), behind a container's name, as `key=value` text,
or as JSON objects.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.stamps import WallClock

__all__ = ["KINDS", "MEMORY_KINDS", "REQUEST_KINDS", "LineReader", "Said", "kind_of"]

KINDS: tuple[tuple[str, str], ...] = (
    ("shift_disabled", r"shift\w* is not supported|(?:ctx_shift|cache_reuse|cache reuse) is not supported"),
    ("checkpoint_failed", r"failed to restore (?:context|SWA|speculative) ?checkpoint"),
    ("checkpoint_restored", r"(?<!failed to )restored context checkpoint|SWA checkpoint restore"),
    ("checkpoint_erased", r"erased invalidated context checkpoint|SWA checkpoint erase"),
    ("checkpoint_evicted", r"erasing (?:old )?context checkpoint"),
    ("checkpoint_created", r"created context checkpoint|SWA checkpoint create"),
    ("forced", r"forcing full prompt re-processing"),
    ("cached", r"(?:cache_tokens|slot\.prompt\.tokens)\.size\(\) ="),
    ("logits", r"need to evaluate at least 1 token"),
    ("prompt", r"new prompt, n_ctx_slot"),
    ("new_slot", r"new slot,? n_ctx"),
    ("rm", r"kv cache rm|memory_seq_rm \["),
    ("progress", r"prompt processing progress"),
    ("done", r"prompt done"),
    ("shift", r"context shift\b.*n_discard|\bcontext shift$"),
    ("chunk", r"reusing chunk with size"),
    ("launch", r"\bprocessing task\b"),
    ("release", r"stop processing:|slot released|released \(\d+ tokens in cache\)"),
    ("prompt_timing", r"prompt eval time\s*="),
    ("eval_timing", r"(?<!prompt )\beval time\s*="),
    ("timing", r"print_timing"),
    ("saved", r"saving prompt with length"),
    ("purged", r"purging slot"),
    ("cleared", r"clear(?:ing)? (?:the )?KV cache"),
    (
        "kv_full",
        r"failed to find free space in the KV cache|KV cache is full|failed to find available cells in kv cache",
    ),
    ("refused", r"exceeds? the available context size"),
    ("out_of_context", r"stopped due to running out of context|input truncated"),
    ("selected", r"selected slot by"),
    ("idle", r"all slots are idle"),
    ("kv_types", r"K \(\w+\):.*V \(\w+\):"),
)
"""Kinds that a log's events come from, by the words that tell them; the first that fits counts."""

_COMPILED = tuple((kind, re.compile(words)) for kind, words in KINDS)

MEMORY_KINDS = frozenset({"prompt", "rm", "progress", "done", "shift", "chunk", "purged", "cleared"})
"""A log that has none of these says nothing of the cache."""

REQUEST_KINDS = frozenset({"launch", "release", "eval_timing"})

_SLOT = re.compile(r"\bslot\s+\S+?:\s+id\s+(\d+)\s*\|\s*task\s+(-?\d+)\s*\|\s*(.*)$")
_OLD_SLOT = re.compile(r"\bslot (\d+)\b")
_FIELD = re.compile(r"([A-Za-z_][\w.]*)(?:\(\))?\s*=\s*'?(-?\d+(?:\.\d+)?)")
_SINCE_START = re.compile(r"^(\d+)\.(\d\d)\.(\d{3})\.(\d{3})\b")
_ISO = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_TIMING = re.compile(r"eval time\s*=\s*([\d.]+) ms /\s*(\d+)")
_RM = re.compile(r"(?:kv cache rm(?: -)?|memory_seq_rm) \[(\d+), end\)")
_CHUNK = re.compile(r"\[(\d+), (\d+)\) -> \[(\d+), (\d+)\)")
_CACHED = re.compile(r"tokens\.size\(\) = (\d+)")
_RELEASED = re.compile(r"slot (\d+) released \((\d+) tokens in cache\)")
_NAMES = {
    "n_prompt_tokens": "prompt_tokens",
    "task.n_tokens": "prompt_tokens",
    "id_slot": "slot",
    "slot_id": "slot",
    "id_task": "task",
    "task_id": "task",
}


@dataclass(frozen=True, slots=True)
class Said:
    """`numbers`: the `name = value` pairs of the line, and what the kind's own form adds."""

    kind: str
    slot: int | None
    task: int | None
    at_ns: int | None
    numbers: dict[str, float]
    text: str

    def number(self, *names: str) -> int | None:
        """The first of these that the line has, as a whole number."""
        found = next((self.numbers[n] for n in names if n in self.numbers), None)
        return None if found is None else int(found)


def kind_of(text: str) -> str | None:
    """The kind of a line; None for one that no event comes from."""
    return next((kind for kind, words in _COMPILED if words.search(text)), None)


class LineReader:
    """Reads the lines of one file."""

    def __init__(self, source: Source, notes: Notes) -> None:
        self._clock = WallClock(source, notes)

    def read(self, line: str) -> Said | None:
        """What the line says; None for one that no event comes from."""
        text, fields = self._unwrapped(line)
        kind = kind_of(text)
        if kind is None:
            return None
        numbers = {_NAMES.get(name, name): float(value) for name, value in _FIELD.findall(text)}
        numbers.update(fields)
        self._add_forms(kind, text, numbers)
        slot, task = numbers.get("slot"), numbers.get("task")
        if found := _SLOT.search(text):
            slot, task = int(found.group(1)), int(found.group(2))
        elif slot is None and (found := _OLD_SLOT.search(text)):
            slot = int(found.group(1))
        at_ns = self._at_ns(line, numbers)
        return Said(
            kind, None if slot is None else int(slot), None if task is None else int(task), at_ns, numbers, text.strip()
        )

    def _unwrapped(self, line: str) -> tuple[str, dict[str, float]]:
        """The message of a JSON line, with its numbers; any other line as it is."""
        start = line.find("{")
        if start < 0 or '"msg"' not in line:
            return line, {}
        try:
            value: Any = json.loads(line[start:])
        except ValueError:
            return line, {}
        numbers = {
            _NAMES.get(k, k): float(v)
            for k, v in value.items()
            if isinstance(v, int | float) and not isinstance(v, bool)
        }
        return str(value.get("msg", "")), numbers

    def _add_forms(self, kind: str, text: str, numbers: dict[str, float]) -> None:
        if kind == "rm" and (found := _RM.search(text)):
            numbers["p0"] = int(found.group(1))
        elif kind in ("prompt_timing", "eval_timing") and (found := _TIMING.search(text)):
            numbers["ms"], numbers["tokens"] = float(found.group(1)), int(found.group(2))
        elif kind == "chunk" and (found := _CHUNK.search(text)):
            numbers.update(zip(("from", "from_stop", "to", "to_stop"), map(int, found.groups()), strict=True))
        elif kind == "cached" and (found := _CACHED.search(text)):
            numbers["cached"] = int(found.group(1))
        elif kind == "release" and (found := _RELEASED.search(text)):
            numbers["slot"], numbers["n_tokens"] = int(found.group(1)), int(found.group(2))
        elif kind in ("saved", "purged"):
            numbers["length"] = int(next(iter(re.findall(r"(?:length|with) (\d+)", text)), "0"))

    def _at_ns(self, line: str, numbers: dict[str, float]) -> int | None:
        if found := _SINCE_START.match(line):
            minutes, seconds, ms, us = map(int, found.groups())
            return (minutes * 60 + seconds) * 10**9 + ms * 10**6 + us * 1000
        if "timestamp" in numbers:
            return int(numbers["timestamp"]) * 10**9
        if found := _ISO.search(line[:120]):
            return self._clock.unix_ns("stamp", found.group(0))
        return None
