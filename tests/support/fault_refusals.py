"""What goes wrong without poisoning anything: refused by type, nothing changed. Part of `docs/contract.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import Cancelled, ContextOverflow, KvtapeError, StateRejected
from kvtape.backends.session import Session
from support.fault_plays import PLAYS, PROMPT, Play

__all__ = ["REFUSALS", "Refusal"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """`what` is done with `play`'s session before `act`, and the error that must come."""

    what: str
    play: Play
    spoil: Callable[[Session], object]
    error: type[KvtapeError]
    act: Callable[[Session], object] | None = None

    def run(self, session: Session) -> object:
        return (self.act or self.play.act)(session)


def _flipped(blob: bytes) -> bytes:
    middle = len(blob) // 2
    return blob[:middle] + bytes([blob[middle] ^ 1]) + blob[middle + 1 :]


def _foreign(blob: bytes) -> bytes:
    """The same rows, whole and sound, of another model."""
    header, payload = unwrap(blob, {})
    return wrap({**header, "fingerprint": "another/model"}, payload)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "corrupt": _flipped,
    "truncated": lambda blob: blob[: len(blob) // 2],
    "foreign": _foreign,
}


def _saved(change: Callable[[bytes], bytes]) -> Callable[[Session], None]:
    def spoil(session: Session) -> None:
        saved = session._snapshots[0]
        session._snapshots[0] = dataclasses.replace(saved, blob=change(saved.blob))

    return spoil


def _cold(change: Callable[[bytes], bytes]) -> Callable[[Session], None]:
    def spoil(session: Session) -> None:
        assert session._parts.cold is not None
        entries = session._parts.cold._entries
        for block_id, entry in entries.items():
            entries[block_id] = dataclasses.replace(entry, blob=change(entry.blob))

    return spoil


def _too_much(session: Session) -> object:
    return session.ensure_prefix([*PROMPT, *([5] * 300)])


REFUSALS: tuple[Refusal, ...] = (
    *(
        Refusal(f"a {name} snapshot is restored", PLAYS["restore"], _saved(c), StateRejected)
        for name, c in DAMAGE.items()
    ),
    *(Refusal(f"a {name} block is admitted", PLAYS["admit"], _cold(c), StateRejected) for name, c in DAMAGE.items()),
    Refusal("more tokens than the context, under none", PLAYS["prefill"], lambda s: None, ContextOverflow, _too_much),
    *(
        Refusal(f"{operation} is cancelled", PLAYS[operation], lambda s: s.cancel(), Cancelled)
        for operation in ("prefill", "decode_until", "rebuild")
    ),
)
"""On every engine."""
