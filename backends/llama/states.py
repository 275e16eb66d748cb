"""Saved states of this backend: what an envelope names, and what a reader must match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvtape.backends.books import Books
from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import InputRejected, StateRejected
from kvtape.backends.protocol import SessionConfig

__all__ = ["SavedBlock", "SavedState", "StateCodec"]

_LAYOUT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """One run of rows: its tape start, where it stood in the cache, its tokens, the engine's bytes."""

    start: int
    cache_start: int
    tokens: list[int]
    payload: bytes


@dataclass(frozen=True, slots=True)
class SavedState:
    """A whole session: its books and the engine's bytes (empty when no row was resident)."""

    books: Books
    payload: bytes


class StateCodec:
    """Envelopes for one model, engine build and configuration; a block or state of another is StateRejected."""

    def __init__(
        self, fingerprint: str, engine_version: str, config: SessionConfig, n_ctx: int, *, swa_full: bool
    ) -> None:
        self._common: dict[str, Any] = {
            "engine": "llama",
            "layout": _LAYOUT_VERSION,
            "engine_version": engine_version,
            "fingerprint": fingerprint,
            "kv_type_k": config.kv_type_k,
            "kv_type_v": config.kv_type_v,
            "flash_attention": config.flash_attention,
        }
        # A block fits any context of the model; a whole state only the same two caches.
        self._sizes = {"n_ctx": n_ctx, "swa_full": swa_full}

    def pack_block(self, block: SavedBlock) -> bytes:
        entries = {"start": block.start, "cache_start": block.cache_start, "tokens": block.tokens}
        return wrap({**self._expected("block"), **entries, "n_tokens": len(block.tokens)}, block.payload)

    def open_block(self, envelope: bytes) -> SavedBlock:
        header, payload = unwrap(envelope, self._expected("block"))
        start, cache_start, n_tokens = (_count(header, key) for key in ("start", "cache_start", "n_tokens"))
        tokens = header.get("tokens")
        if not isinstance(tokens, list) or not 0 < len(tokens) == n_tokens:
            raise StateRejected(f"saved block does not name its {n_tokens} tokens")
        return SavedBlock(start, cache_start, tokens, payload)

    def pack_state(self, state: SavedState) -> bytes:
        entries = {"segments": state.books.to_json(), "n_tokens": state.books.n_rows}
        return wrap({**self._expected("state"), **self._sizes, **entries}, state.payload)

    def open_state(self, envelope: bytes) -> SavedState:
        header, payload = unwrap(envelope, {**self._expected("state"), **self._sizes})
        try:
            books = Books.from_json(header["segments"])
        except (InputRejected, KeyError, TypeError, ValueError) as err:
            raise StateRejected(f"saved state has no readable segments: {err}") from None
        if books.n_rows != _count(header, "n_tokens") or (books.n_rows == 0) != (not payload):
            raise StateRejected(f"saved state of {len(payload)} bytes does not hold its {books.n_rows} rows")
        return SavedState(books, payload)

    def _expected(self, kind: Literal["block", "state"]) -> dict[str, Any]:
        return {**self._common, "kind": kind}


def _count(header: Mapping[str, Any], key: str) -> int:
    value = header.get(key)
    if not isinstance(value, int) or value < 0:
        raise StateRejected(f"saved state has {key} {value!r}, a count is needed")
    return value
