"""KV events of vLLM and SGLang: what one rank's cache did, as a session of its own.

    BlockStored          prefill: the blocks go to the tape's end, with their hashes
      on another medium  the block has a copy there: it will go cold, not away
      of a cold block    admit
    BlockRemoved         evict of one copy (cold where a copy is elsewhere); off the other medium: trim
    AllBlocksCleared     truncate to 0

One hash can be in several blocks: it is resident until the last of them goes. A removal of what is not there is noted
and recorded as `refuse`. Each publisher counts its batches: after a gap the session ends with `lost` and another one
begins, whose resident set is then a floor; a repeated batch is dropped.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvtape.planner.events import Op, Placement, Way
from kvtape.traces.importers.kv_wire import Batch, KvEvent, Unpacker, frames, is_framed, json_batches
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Record, Rules, Step
from kvtape.traces.importers.sniffing import first_line
from kvtape.traces.importers.source import Source

__all__ = ["KV_EVENTS", "KvEvents"]

_HOME = (None, "GPU", "gpu")
"""Names of the medium that a rank computes in; anything else is a colder place."""


class KvEvents:
    name = "kv-events"
    summary = "KV events of vLLM and SGLang (MessagePack frames or JSON lines, array and map forms)"
    rules = Rules("seconds", id_scope="global", ordered=True)

    def recognises(self, head: bytes, name: str) -> bool:
        line = first_line(head)
        tagged = any(tag in line for tag in (b'"BlockStored"', b'"BlockRemoved"', b'"AllBlocksCleared"'))
        return is_framed(head) or (line[:1] in (b"{", b"[") and tagged)

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        unpacker = Unpacker(source)
        batches = frames(source, unpacker) if is_framed(source.head) else json_batches(source, unpacker)
        publishers: dict[int | None, _Publisher] = {}
        for batch in batches:
            publisher = publishers.setdefault(batch.rank, _Publisher(batch.rank, source, notes))
            yield from publisher.follow(batch)
        for publisher in publishers.values():
            publisher.end()


@dataclass
class _Publisher:
    """One rank: its sequence numbers, and the cache of its session at hand."""

    rank: int | None
    source: Source
    notes: Notes
    part: int = 1
    last_sequence: int | None = None
    last_ns: int = 0
    digests: dict[int, bytes] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.cache = _Cache(self._session(), self.source, self.notes)

    def _session(self) -> str:
        name = "rank-none" if self.rank is None else f"rank-{self.rank}"
        return name if self.part == 1 else f"{name}-part-{self.part}"

    def follow(self, batch: Batch) -> Iterator[Record]:
        at_ns = self._time(batch)
        if batch.sequence is not None:
            digest = hashlib.blake2b(batch.raw, digest_size=16).digest()
            if self.digests.get(batch.sequence) == digest:
                self.source.repeated.append(self.source.line)
                self.source.leaves_out_repeated = True
                return
            yield from self._sequence(batch.sequence, at_ns)
            self.digests[batch.sequence] = digest
        for event in batch.events:
            if event.ignored:
                text = "fields that kvtape has no use for were left out"
                self._warn("unknown_fields", text, event.ignored)
            self._lineage(event)
            yield from self.cache.follow(event, at_ns)

    def _time(self, batch: Batch) -> int:
        if batch.at_ns is None:
            self._warn("no_times", "no times: the events stand at time 0, in the order of the file")
            return 0
        if batch.at_ns < self.last_ns:
            self._warn("time_back", "the batch is dated before the one before it; the order of the file counts")
        self.last_ns = batch.at_ns
        return batch.at_ns

    def _sequence(self, sequence: int, at_ns: int) -> Iterator[Record]:
        last, self.last_sequence = self.last_sequence, sequence
        if last is None or sequence == last + 1:
            return
        if sequence > last + 1:
            missing = sequence - last - 1
            self._warn("sequence_gap", "batches are missing before this one: what was resident is a floor", missing)
            detail: dict[str, Any] = {"events": 1, "batches": missing}
            yield Step(
                line=self.source.line,
                at_ns=at_ns,
                session=self.cache.session,
                op=Op.LOST,
                columns={"reason": "sequence_gap"},
                detail=detail,
            )
        elif sequence == 0:
            self._warn("publisher_restart", "the sequence begins at 0 again: the engine was started anew")
            self.digests.clear()
        else:
            what = f"sequence {sequence} after {last}, with other content than before"
            raise self.source.rejected("sequence", what, "give the batches in the order of their publisher")
        self.part += 1
        self.cache = _Cache(self._session(), self.source, self.notes)

    def _lineage(self, event: KvEvent) -> None:
        """Which parents were never seen; one that comes later mends the chain."""
        if event.tag != "BlockStored":
            return
        if event.parent is not None and event.parent not in self.known:
            self.parents.setdefault(event.parent, self.source.line)
        self.known.update(event.hashes)

    def end(self) -> None:
        for parent, line in self.parents.items():
            if parent not in self.known:
                text = "the parent of a stored block was never stored: hits along its chain are a floor"
                self.notes.warn("orphan_parent", self.source.name, line, text)

    def _warn(self, kind: str, text: str, count: int = 1) -> None:
        self.notes.warn(kind, self.source.name, self.source.line, text, count)


@dataclass(slots=True)
class _Rows:
    """A run of rows in the cache, up to cache position `stop`; dead once they are removed."""

    stop: int
    live: bool = True


@dataclass(slots=True)
class _Copy:
    """A block on the tape and its rows in the cache."""

    block_id: int
    start: int
    stop: int
    rows: _Rows

    @property
    def n_tokens(self) -> int:
        return self.stop - self.start


class _Cache:
    """One rank's cache as its events tell it."""

    def __init__(self, session: str, source: Source, notes: Notes) -> None:
        self.session = session
        self._source, self._notes = source, notes
        self._resident: dict[int, deque[_Copy]] = defaultdict(deque)
        self._cold: dict[int, deque[_Copy]] = defaultdict(deque)
        self._elsewhere: dict[int, int] = defaultdict(int)
        self._rows: list[_Rows] = []
        self._next_id = self._tape = self._tokens = 0
        self._seen: set[int] = set()

    def follow(self, event: KvEvent, at_ns: int) -> Iterator[Step]:
        home = event.medium in _HOME
        if event.tag == "AllBlocksCleared":
            yield self._cleared(at_ns)
        elif event.tag == "BlockStored" and home:
            yield from self._stored(event, at_ns)
        elif event.tag == "BlockStored":
            for h in event.hashes:
                self._copied(h)
        else:
            for h in event.hashes:
                yield self._removed(h, at_ns) if home else self._dropped(h, at_ns)

    def _step(self, at_ns: int, op: Op, columns: dict[str, Any], **more: Any) -> Step:
        return Step(line=self._source.line, at_ns=at_ns, session=self.session, op=op, columns=columns, **more)

    def _append(self, n_tokens: int) -> _Rows:
        """Rows behind the largest cache position in use."""
        self._rows.append(_Rows(self._cache_end() + n_tokens))
        return self._rows[-1]

    def _cache_end(self) -> int:
        while self._rows and not self._rows[-1].live:
            self._rows.pop()
        return self._rows[-1].stop if self._rows else 0

    def _stored(self, event: KvEvent, at_ns: int) -> Iterator[Step]:
        """Cold blocks come back one by one; what lies between them is computed."""
        fresh: list[int] = []
        for i, h in enumerate(event.hashes):
            if self._cold[h]:
                if fresh:
                    yield self._computed(event, fresh, at_ns)
                    fresh = []
                yield self._admitted(h, at_ns)
            else:
                fresh.append(i)
        if fresh:
            yield self._computed(event, fresh, at_ns)

    def _computed(self, event: KvEvent, numbers: list[int], at_ns: int) -> Step:
        assert event.block_tokens is not None
        size, start, cache_start = event.block_tokens, self._tape, self._cache_end()
        hashes = [event.hashes[i] for i in numbers]
        again = sum(h in self._seen for h in hashes) * size
        blocks = []
        for h in hashes:
            copy = _Copy(self._next_id, self._tape, self._tape + size, self._append(size))
            self._next_id += 1
            self._tape = copy.stop
            self._resident[h].append(copy)
            blocks.append((copy.block_id, copy.start, copy.stop))
        self._seen.update(hashes)
        self._tokens += self._tape - start
        columns = {"start": start, "stop": self._tape, "n_tokens": self._tape - start, "cache_start": cache_start}
        columns |= {"resident_tokens": self._tokens, "recomputed_tokens": again}
        detail = {"parent": None if event.parent is None else f"{event.parent:016x}", "lora": event.lora}
        tokens = None
        if event.tokens is not None:
            tokens = [t for i in numbers for t in event.tokens[i * size : (i + 1) * size]]
        return self._step(
            at_ns,
            Op.PREFILL,
            columns,
            hashes=hashes,
            block_tokens=size,
            tokens=tokens,
            blocks=blocks,
            detail={k: v for k, v in detail.items() if v is not None},
        )

    def _admitted(self, h: int, at_ns: int) -> Step:
        copy = self._cold[h].popleft()
        copy.rows = self._append(copy.n_tokens)
        cache_start = copy.rows.stop - copy.n_tokens
        self._resident[h].append(copy)
        self._tokens += copy.n_tokens
        columns = self._place(copy) | {"cache_start": cache_start, "block_id": copy.block_id}
        columns |= {"placement": Placement.APPEND.value, "resident_tokens": self._tokens}
        return self._step(at_ns, Op.ADMIT, columns)

    def _place(self, copy: _Copy) -> dict[str, Any]:
        return {"start": copy.start, "stop": copy.stop, "n_tokens": copy.n_tokens}

    def _removed(self, h: int, at_ns: int) -> Step:
        if not self._resident[h]:
            text = "a block was removed that is not there (removed before, or stored before the file begins)"
            return self._fault("removed_unknown", text, h, at_ns)
        copy = self._resident[h].popleft()
        cold = self._elsewhere[h] > len(self._cold[h])
        if cold:
            self._cold[h].append(copy)
        copy.rows.live = False
        self._tokens -= copy.n_tokens
        columns: dict[str, Any] = self._place(copy) | {"way": Way.GAP.value, "cold": cold}
        columns |= {"blocks": f"[[{copy.block_id},{copy.start},{copy.stop}]]", "resident_tokens": self._tokens}
        return self._step(at_ns, Op.EVICT, columns)

    def _copied(self, h: int) -> None:
        if not self._resident[h]:
            text = "a block was stored on another medium while it was not resident: the copy is not followed"
            self._notes.warn("copy_of_unknown", self._source.name, self._source.line, text)
            return
        self._elsewhere[h] += 1

    def _dropped(self, h: int, at_ns: int) -> Step:
        """A copy on another medium goes; a block that is only there is gone with it."""
        if not self._elsewhere[h]:
            text = "a block was removed from a medium on which it is not"
            return self._fault("removed_unknown", text, h, at_ns)
        self._elsewhere[h] -= 1
        if self._cold[h] and len(self._cold[h]) > self._elsewhere[h]:
            copy = self._cold[h].popleft()
            return self._step(at_ns, Op.TRIM, self._place(copy) | {"block_id": copy.block_id})
        return self._step(at_ns, Op.PLAN, {"reason": "copy_dropped"}, detail={"hash": f"{h:016x}"})

    def _fault(self, kind: str, text: str, h: int, at_ns: int) -> Step:
        self._notes.warn(kind, self._source.name, self._source.line, text)
        columns = {"reason": kind, "error_class": "data_fault"}
        return self._step(at_ns, Op.REFUSE, columns, detail={"hash": f"{h:016x}"})

    def _cleared(self, at_ns: int) -> Step:
        self._resident.clear()
        self._cold.clear()
        self._elsewhere.clear()
        self._rows.clear()
        self._tape = self._tokens = 0
        columns = {"start": 0, "reason": "all_blocks_cleared", "resident_tokens": 0}
        return self._step(at_ns, Op.TRUNCATE, columns)


KV_EVENTS = KvEvents()
