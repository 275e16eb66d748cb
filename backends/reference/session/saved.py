"""Saved states of the reference: what an envelope names, and what a reader must match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from kvtape.backends.books import Books
from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import InputRejected, StateRejected

__all__ = ["SavedBlock", "SavedState", "StateCodec"]

_LAYOUT_VERSION: Final = 1


class SavedBlock(NamedTuple):
    """One run of rows: its tape start, where it stood in the cache, its tokens, and the bytes of its rows."""

    start: int
    cache_start: int
    tokens: list[int]
    payload: bytes


class SavedState(NamedTuple):
    """A whole session: its books, and the bytes of what carries it."""

    books: Books
    payload: bytes


class StateCodec:
    """Envelopes for one model, version, KV engine and float type; a state of another is StateRejected."""

    def __init__(self, fingerprint: str, version: str, engine: str, dtype: str) -> None:
        self._common = {
            "engine": "reference",
            "layout": _LAYOUT_VERSION,
            "engine_version": version,
            "fingerprint": fingerprint,
            "kv_engine": engine,
            "dtype": dtype,
        }

    def pack_block(self, block: SavedBlock) -> bytes:
        entries = {"start": block.start, "cache_start": block.cache_start, "tokens": block.tokens}
        return wrap({**self._expected("block"), **entries}, block.payload)

    def open_block(self, envelope: bytes) -> SavedBlock:
        header, payload = unwrap(envelope, self._expected("block"))
        start, cache_start = _count(header, "start"), _count(header, "cache_start")
        tokens = header.get("tokens")
        if not isinstance(tokens, list) or not tokens or any(type(token) is not int for token in tokens):
            raise StateRejected("saved block does not name its tokens")
        return SavedBlock(start, cache_start, tokens, payload)

    def pack_state(self, state: SavedState) -> bytes:
        return wrap({**self._expected("state"), "segments": state.books.to_json()}, state.payload)

    def open_state(self, envelope: bytes) -> SavedState:
        header, payload = unwrap(envelope, self._expected("state"))
        try:
            return SavedState(Books.from_json(header["segments"]), payload)
        except (InputRejected, KeyError, TypeError, ValueError) as err:
            raise StateRejected(f"saved state has no readable segments: {err}") from None

    def _expected(self, kind: Literal["block", "state"]) -> dict[str, Any]:
        return {**self._common, "kind": kind}


def _count(header: Mapping[str, Any], key: str) -> int:
    value = header.get(key)
    if not isinstance(value, int) or value < 0:
        raise StateRejected(f"saved state has {key} {value!r}, a count is needed")
    return value
