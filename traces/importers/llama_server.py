"""llama-server logs of every wording since build b1953: each slot is a session.

    new prompt                 prompt            kv cache rm, memory_seq_rm    truncate, and what was reused
    prompt processing ...      prefill           stop processing               decode, generate
    context shift, chunk reuse evict + shift     context checkpoints           snapshot, restore, plan (erased)

From b9994 on the lines about the cache are written at trace level only. A log that has two requests before any of them
is imported as requests up to the first, with the warning `level_too_low`: that nothing was evicted is not known.

What a line says is a step once no later line changes it, so that a log can be followed while it grows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvtape.traces.importers.llama_lines import MEMORY_KINDS, REQUEST_KINDS, LineReader, Said, kind_of
from kvtape.traces.importers.llama_slot import Slot
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Record, Rules, Step
from kvtape.traces.importers.source import MOST_LINE, Source

__all__ = ["LLAMA_SERVER", "LlamaServer"]

_KV_TYPES = re.compile(r"\b[KV] \((\w+)\):")
_LOW = (
    "requests, but no line about the cache: the log level is too low (from b9994 run llama-server with trace level), "
    "so whether anything was evicted is not known"
)


_REQUESTS = 2
"""So many whole requests without a line about the cache, and the log is taken for one that has none."""
_MOST_HELD = 4096
"""Lines that may wait for that to be clear."""


class LlamaServer:
    name = "llama-server"
    summary = "llama-server logs of any build since b1953 (text or JSON lines)"
    rules = Rules("log stamps", id_scope="file", ordered=True)

    def recognises(self, head: bytes, name: str) -> bool:
        lines = head.decode("utf-8", "replace").splitlines()
        return any(kind_of(line) is not None and ("slot" in line or "srv" in line) for line in lines)

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        log = _Log(source, notes)
        reader = LineReader(source, notes)
        for raw in source.lines():
            said = reader.read(raw[:MOST_LINE].decode("utf-8", "replace"))
            if said is not None:
                yield from log.add(said)
        source.repeated.clear()  # a log says the same thing twice when it happened twice
        yield from log.end()


class _Log:
    """Line by line, its slots. Lines wait until it is clear whether the log says anything of the cache."""

    def __init__(self, source: Source, notes: Notes) -> None:
        self._source, self._notes = source, notes
        self._low: bool | None = None
        self._held: list[tuple[int, Said]] = []
        self._launched: set[int | None] = set()
        self._ended = 0
        self._slots: dict[int | None, Slot] = {}
        self._facts: dict[str, str] = {}
        self._timed: Slot | None = None
        self._selected: Slot | None = None
        self._last_ns = 0
        self._dated = self._any = False

    def add(self, said: Said) -> Iterator[Step]:
        """The steps that are certain with this line."""
        self._any, self._dated = True, self._dated or said.at_ns is not None
        self._last_ns = self._last_ns if said.at_ns is None else said.at_ns
        said = Said(said.kind, said.slot, said.task, self._last_ns, said.numbers, said.text)
        if self._low is None:
            self._held.append((self._source.line, said))
            self._look(said)
        else:
            self._raise_level(said)
            self._play(said)
        yield from self._taken()

    def end(self) -> Iterator[Step]:
        if self._low is None:
            self._decide(any(said.kind in REQUEST_KINDS for _, said in self._held))
        if self._any and not self._dated:
            text = "no times: the events stand at time 0, in the order of the file"
            self._notes.warn("no_times", self._source.name, None, text)
        for slot in self._slots.values():
            slot.finish()
        yield from self._taken()

    def _look(self, said: Said) -> None:
        """A first line about the cache decides, or two requests from launch to release without any."""
        if said.kind in MEMORY_KINDS:
            self._decide(False)
            return
        if said.kind == "launch":
            self._launched.add(said.slot)
        elif said.kind == "release" and said.slot in self._launched:
            self._launched.remove(said.slot)
            self._ended += 1
        if self._ended >= _REQUESTS or len(self._held) >= _MOST_HELD:
            self._decide(any(s.kind in REQUEST_KINDS for _, s in self._held))

    def _decide(self, low: bool) -> None:
        self._low = low
        if low:
            self._notes.warn("level_too_low", self._source.name, None, _LOW)
        at, held, self._held = self._source.line, self._held, []
        for self._source.line, said in held:
            self._play(said)
        self._source.line = at

    def _raise_level(self, said: Said) -> None:
        """The server was started anew, at a level that tells of the cache."""
        if self._low and said.kind in MEMORY_KINDS:
            self._low = False
            for slot in self._slots.values():
                slot.settle()

    def _play(self, said: Said) -> None:
        self._requests_only(said) if self._low else self._follow(said)

    def _taken(self) -> Iterator[Step]:
        for slot in self._slots.values():
            yield from slot.take()

    def _slot(self, said: Said) -> Slot:
        """The slot of the line; one that names none belongs to the only busy one, or to a session `slot`."""
        busy = [slot for slot in self._slots.values() if slot.busy]
        if said.slot is None and len(busy) == 1:
            return busy[0]
        if said.slot not in self._slots:
            name = "slot" if said.slot is None else f"slot-{said.slot}"
            self._slots[said.slot] = Slot(name, self._source, self._notes)
            self._slots[said.slot].facts.update(self._facts)
        return self._slots[said.slot]

    def _requests_only(self, said: Said) -> None:
        if said.kind in ("timing", "launch"):
            self._timed = self._slot(said)
            if said.kind == "launch":
                self._timed.launch(said)
        elif said.kind == "new_slot":
            self._slot(said).context(said)
        elif said.kind == "prompt_timing":
            (self._timed or self._slot(said)).prompt_timing(said)
        elif said.kind == "eval_timing":
            (self._timed or self._slot(said)).eval_timing(said)
        elif said.kind == "release":
            self._slot(said).release_without_memory(said)
        elif said.kind == "idle":
            for slot in self._slots.values():
                slot.settle()

    def _follow(self, said: Said) -> None:
        kind = said.kind
        if kind in ("prompt_timing", "eval_timing"):
            getattr(self._timed or self._slot(said), kind)(said)
        elif kind == "timing":
            self._timed = self._slot(said)
        elif kind == "idle":
            for slot in self._slots.values():
                slot.finish()
        elif kind == "cleared":
            for slot in self._slots.values():
                slot.clear(said, "cleared")
        elif kind == "kv_types":
            self._facts = dict(zip(("kv_type_k", "kv_type_v"), _KV_TYPES.findall(said.text), strict=False))
        elif kind == "shift_disabled":
            text = "the server switched context shift or chunk reuse off: only prefixes are reused"
            self._notes.warn("reuse_disabled", self._source.name, self._source.line, text)
        elif kind == "new_slot":
            self._slot(said).context(said)
        elif kind == "selected":
            self._selected = self._slot(said)
        elif kind == "saved":
            if self._selected is not None:
                self._selected.created(said, "prompt_cache")
        else:
            self._slot_line(said)

    def _slot_line(self, said: Said) -> None:
        slot = self._slot(said)
        if said.kind == "purged":
            slot.clear(said, "purged")
        elif said.kind == "checkpoint_created":
            slot.created(said)
        elif said.kind in ("checkpoint_erased", "checkpoint_evicted"):
            slot.erased(said, said.kind)
        elif said.kind == "checkpoint_restored":
            slot.restored(said)
        elif said.kind == "checkpoint_failed":
            slot.failed(said)
        elif said.kind != "out_of_context":
            getattr(slot, said.kind)(said)


LLAMA_SERVER = LlamaServer()
