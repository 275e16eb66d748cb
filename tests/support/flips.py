"""Single flipped bits in the files of a log, wherever they fall: each must be noticed."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvtape.traces.errors import TraceError
from kvtape.traces.verify import verify
from support.forge import copy_log

__all__ = ["FlipTally", "flip_bits"]


@dataclass(slots=True)
class FlipTally:
    """`flips` made; how they were noticed, by error or finding; `missed`: byte and bit of those that were not."""

    flips: int = 0
    noticed: Counter[str] = field(default_factory=Counter)
    missed: list[tuple[int, int]] = field(default_factory=list)


def flip_bits(log: Path, suffix: str, folder: Path, *, n: int, seed: int) -> FlipTally:
    """Flip `n` bits, one at a time, in the file `log` + `suffix` of a copy of the log, and verify each copy.

    Half of them fall on bytes that are not zero: most of a small database file is empty space.
    """
    rng, tally = random.Random(seed), FlipTally()
    copy = copy_log(log, folder / log.name)
    target = copy.with_name(copy.name + suffix)
    whole = target.read_bytes()
    full = [i for i, byte in enumerate(whole) if byte]
    for trial in range(n):
        at, bit = rng.choice(full) if trial % 2 else rng.randrange(len(whole)), rng.randrange(8)
        with target.open("r+b") as handle:
            handle.seek(at)
            handle.write(bytes([whole[at] ^ 1 << bit]))
        tally.flips += 1
        try:
            found = verify(copy).findings
        except TraceError as err:
            tally.noticed[type(err).__name__] += 1
        else:
            if found:
                tally.noticed[str(found[0].kind)] += 1
            else:
                tally.missed.append((at, bit))
        with target.open("r+b") as handle:
            handle.seek(at)
            handle.write(whole[at : at + 1])
    assert target.read_bytes() == whole
    assert verify(copy).ok, "the last flip was taken back"
    shutil.rmtree(folder)
    return tally
