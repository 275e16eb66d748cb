"""What a backend session can do. Never what it prefers: a flag is true if and only if the operation works."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Capabilities"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """One session's abilities, on this model with this configuration.

    `remove_tail`, `remove_middle`: rows can be taken out of the cache in place.
    `position_shift`: the keys of resident rows can be rotated to other cache positions.
    `sparse_attention`: the engine applies a sparse prefill pattern. `sliding_window_attention_tokens`: the
    window that the engine applies, in tokens; 0 for none.
    `cold_store`: a range can be exported and put back. `recompute_range`: an evicted range can be refilled
    from the tape. `attention_scores`: the session was opened with a score source.
    `snapshot_state`: the whole state can be saved and restored bit-equal.
    """

    remove_tail: bool = False
    remove_middle: bool = False
    position_shift: bool = False
    sparse_attention: bool = False
    sliding_window_attention_tokens: int = 0
    cold_store: bool = False
    recompute_range: bool = False
    attention_scores: bool = False
    snapshot_state: bool = False
