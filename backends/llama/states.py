"""Saved states of this backend: what an envelope names, and what a reader must match."""

from __future__ import annotations

from typing import Any, Final, Literal

from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import StateRejected
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.saved_states import SavedBlock, SavedState, read_books, read_count

__all__ = ["StateCodec"]

_LAYOUT_VERSION: Final = 1


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
        entries = {**block.header(), "n_tokens": len(block.tokens)}
        return wrap({**self._expected("block"), **entries}, block.payload)

    def open_block(self, envelope: bytes) -> SavedBlock:
        header, payload = unwrap(envelope, self._expected("block"))
        start, cache_start, n_tokens = (read_count(header, key) for key in ("start", "cache_start", "n_tokens"))
        tokens = header.get("tokens")
        if not isinstance(tokens, list) or not 0 < len(tokens) == n_tokens:
            raise StateRejected(f"saved block does not name its {n_tokens} tokens")
        return SavedBlock(start, cache_start, tokens, payload)

    def pack_state(self, state: SavedState) -> bytes:
        entries = {"segments": state.books.to_json(), "n_tokens": state.books.n_rows}
        return wrap({**self._expected("state"), **self._sizes, **entries}, state.payload)

    def open_state(self, envelope: bytes) -> SavedState:
        header, payload = unwrap(envelope, {**self._expected("state"), **self._sizes})
        books = read_books(header)
        if books.n_rows != read_count(header, "n_tokens") or (books.n_rows == 0) != (not payload):
            raise StateRejected(f"saved state of {len(payload)} bytes does not hold its {books.n_rows} rows")
        return SavedState(books, payload)

    def _expected(self, kind: Literal["block", "state"]) -> dict[str, Any]:
        return {**self._common, "kind": kind}
