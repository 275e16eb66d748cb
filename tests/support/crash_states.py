"""Every state in which a power cut may leave the disk, rebuilt from recorded calls, and judged.

After each call, five variants of what had not been synced by then:

    all       every write is there (a killed process)
    none      no unsynced write is there, and no name that was not synced
    some      a random part of the unsynced writes, a random number of the unsynced names in their order
    torn      everything, but the last unsynced write is cut in its middle, at 512 bytes, or at a page
    zeros     everything, but the second half of the last unsynced write reads as zeros

Names keep their order, as in any journalling file system; writes do not.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from support.disk_calls import Call
from support.workload import judge

__all__ = ["FAULTS", "VARIANTS", "Survey", "survey"]

VARIANTS = ("all", "none", "some", "torn", "zeros")
_NAMES = ("create", "rename", "link", "unlink")


@dataclass(slots=True)
class Survey:
    """`states` judged; how each variant came out; a line in `wrong` for everything that must never be."""

    states: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def survey(calls: Sequence[Call], folder: Path, *, seed: int, every: int = 1, first_only: bool = False) -> Survey:
    """Judge the states after each call (after one in `every`, chosen by `seed`), up to the first wrong one if asked."""
    rng, found = random.Random(seed), Survey()
    for k in range(1, len(calls) + 1):
        if calls[k - 1].kind == "say" or rng.randrange(every):
            continue
        said = [c.data.decode() for c in calls[:k] if c.kind == "say"]
        for variant, kept in _variants(calls[:k], rng):
            where = folder / "state"
            where.mkdir()
            for name, data in _files(kept).items():
                (where / name).write_bytes(data)
            verdict = judge(where / "a.duckdb", said, where / "repaired.duckdb")
            shutil.rmtree(where)
            found.states += 1
            found.outcomes[f"{variant} {verdict.how}"] += 1
            if verdict.wrong is not None:
                found.wrong.append(f"after call {k} ({calls[k - 1].kind}), {variant}: {verdict.wrong}")
                if first_only:
                    return found
    return found


def _variants(calls: Sequence[Call], rng: random.Random) -> Iterator[tuple[str, list[Call]]]:
    writes, names = _unsynced(calls)
    yield "all", list(calls)
    if not writes and not names:
        return
    yield "none", _without(calls, {*writes, *names})
    lost = set(rng.sample(writes, rng.randint(0, len(writes)))) | set(names[rng.randint(0, len(names)) :])
    yield "some", _without(calls, lost)
    last = next((i for i in reversed(writes) if calls[i].kind == "write" and len(calls[i].data) > 1), None)
    if last is None:
        return
    data = calls[last].data
    cut = rng.choice([n for n in (len(data) // 2, 512, len(data) // 4096 * 4096, len(data) - 1) if 0 < n < len(data)])
    yield "torn", [*calls[:last], replace(calls[last], data=data[:cut]), *calls[last + 1 :]]
    half = len(data) // 2
    zeros = replace(calls[last], data=data[:half] + bytes(len(data) - half))
    yield "zeros", [*calls[:last], zeros, *calls[last + 1 :]]


def _unsynced(calls: Sequence[Call]) -> tuple[list[int], list[int]]:
    """Indices of the writes (and cuts) and of the names that no sync has made durable."""
    writes: list[int] = []
    names: list[int] = []
    for i, call in enumerate(calls):
        if call.kind in ("write", "cut"):
            writes.append(i)
        elif call.kind == "sync":
            writes = [j for j in writes if calls[j].file != call.file]
        elif call.kind in _NAMES:
            names.append(i)
        elif call.kind == "sync_names":
            names = []
    return writes, names


def _without(calls: Sequence[Call], lost: set[int]) -> list[Call]:
    return [c for i, c in enumerate(calls) if i not in lost]


def _files(calls: Sequence[Call]) -> dict[str, bytes]:
    """Names and contents after the calls."""
    contents: dict[int, bytearray] = {}
    names: dict[str, int] = {}
    for call in calls:
        if call.kind == "write":
            _put(contents.setdefault(call.file, bytearray()), call.at, call.data)
        elif call.kind == "cut":
            content = contents.setdefault(call.file, bytearray())
            del content[call.at :]
            content.extend(bytes(call.at - len(content)))
        elif call.kind == "create":
            names[call.name] = call.file
        elif call.kind in ("link", "rename"):
            names[call.other] = call.file
            if call.kind == "rename":
                names.pop(call.name, None)
        elif call.kind == "unlink":
            names.pop(call.name, None)
    return {name: bytes(contents.get(file, b"")) for name, file in names.items()}


def _put(content: bytearray, at: int, data: bytes) -> None:
    content.extend(bytes(max(0, at + len(data) - len(content))))
    content[at : at + len(data)] = data


def _never_synced(calls: Sequence[Call]) -> list[Call]:
    return [c for c in calls if c.kind != "sync"]


def _names_never_synced(calls: Sequence[Call]) -> list[Call]:
    return [c for c in calls if c.kind != "sync_names"]


def _said_too_soon(calls: Sequence[Call]) -> list[Call]:
    """Every acknowledgement comes before the calls that it is about: right behind the one before it."""
    moved: list[Call] = []
    place = 0
    for call in calls:
        if call.kind == "say":
            moved.insert(place, call)
            place = len(moved)
        else:
            moved.append(call)
    return moved


FAULTS: dict[str, Callable[[Sequence[Call]], list[Call]]] = {
    "data is never synced": _never_synced,
    "names are never synced": _names_never_synced,
    "acknowledged before it is written": _said_too_soon,
}
"""Planted in the recorded calls: each must be found."""
