"""Tokens that are on a session's tape and not computed yet: what `deferred` computes with the next decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtape.backends.catalog import Stretch

__all__ = ["Offer", "Pending", "clipped"]


@dataclass(frozen=True, slots=True)
class Offer:
    """What of one call still waits: `tokens` from tape position `start` on; the call's own began at `origin`.

    `stretches` say what stands there and may reach further on both sides.
    """

    origin: int
    start: int
    tokens: tuple[int, ...]
    stretches: tuple[Stretch, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def laid(self) -> list[Stretch]:
        """Its stretches, between its ends."""
        return clipped(self.stretches, self.start, self.stop)


class Pending:
    """Offers in tape order, each beginning where the one before stops, the first where the computed tape ends."""

    def __init__(self) -> None:
        self._offers: tuple[Offer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._offers)

    @property
    def offers(self) -> tuple[Offer, ...]:
        return self._offers

    @property
    def n_tokens(self) -> int:
        return sum(len(o.tokens) for o in self._offers)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for o in self._offers for t in o.tokens)

    def laid(self) -> list[Stretch]:
        """What stands where, in tape order."""
        return [s for o in self._offers for s in o.laid()]

    def add(self, offer: Offer) -> None:
        """Put an offer of at least one token behind the others."""
        assert offer.tokens
        assert not self._offers or offer.start == self._offers[-1].stop, "an offer begins where the last one stops"
        self._offers = (*self._offers, offer)

    def cut(self, tape_stop: int) -> None:
        """Nothing stands at or past `tape_stop` any more."""
        kept = (replace(o, tokens=o.tokens[: max(0, tape_stop - o.start)]) for o in self._offers)
        self._offers = tuple(o for o in kept if o.tokens)

    def behind(self, offers: Sequence[Offer], tape_length: int) -> None:
        """What of `offers` is behind a computed tape of `tape_length` tokens is what waits."""
        gone = ((o, max(0, tape_length - o.start)) for o in offers)
        left = (replace(o, start=o.start + n, tokens=o.tokens[n:]) for o, n in gone)
        self._offers = tuple(o for o in left if o.tokens)


def clipped(stretches: Sequence[Stretch], start: int, stop: int) -> list[Stretch]:
    """The parts of `stretches` within `[start, stop)`."""
    parts = (replace(s, start=max(s.start, start), stop=min(s.stop, stop)) for s in stretches)
    return [s for s in parts if s.start < s.stop]
