"""Saved states of the reference: what an envelope names, and what a reader must match."""

from __future__ import annotations

from typing import Any, Final, Literal

from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import StateRejected
from kvtape.backends.saved_states import SavedBlock, SavedState, read_books, read_count

__all__ = ["StateCodec"]

_LAYOUT_VERSION: Final = 1


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
        return wrap({**self._expected("block"), **block.header()}, block.payload)

    def open_block(self, envelope: bytes) -> SavedBlock:
        header, payload = unwrap(envelope, self._expected("block"))
        start, cache_start = read_count(header, "start"), read_count(header, "cache_start")
        tokens = header.get("tokens")
        if not isinstance(tokens, list) or not tokens or any(type(token) is not int for token in tokens):
            raise StateRejected("saved block does not name its tokens")
        return SavedBlock(start, cache_start, tokens, payload)

    def pack_state(self, state: SavedState) -> bytes:
        return wrap({**self._expected("state"), "segments": state.books.to_json()}, state.payload)

    def open_state(self, envelope: bytes) -> SavedState:
        header, payload = unwrap(envelope, self._expected("state"))
        return SavedState(read_books(header), payload)

    def _expected(self, kind: Literal["block", "state"]) -> dict[str, Any]:
        return {**self._common, "kind": kind}
