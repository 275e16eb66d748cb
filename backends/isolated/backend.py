"""A session whose native context is in another process. Every call goes there; nothing is decided or remembered here
but what the session was told when it opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType

from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.isolated.channel import Channel
from kvtape.backends.isolated.opened import Opened
from kvtape.backends.protocol import (
    AttentionMass,
    Choose,
    Computed,
    DecodeRun,
    Logits,
    Witness,
)
from kvtape.backends.verifying import Keep, Verified
from kvtape.planner.layout import Layout
from kvtape.planner.ranges import RangeSet

__all__ = ["OPERATIONS", "IsolatedBackend"]

OPERATIONS = frozenset(
    {
        "abort_next",
        "admit",
        "books",
        "decode_until",
        "evict",
        "export_block",
        "kv_bytes",
        "prefill",
        "rebuild",
        "refill",
        "refusal",
        "restore",
        "score",
        "shift",
        "snapshot",
        "take_mass",
        "truncate",
        "verify",
        "witness",
    }
)
"""What a host may be asked of a session."""


class IsolatedBackend:
    """See `protocol.Backend`. Name, version and facts are the engine's, so a log is the same with and without a host.

    Beside what the engine raises: EngineFault device_lost when the host dies or hangs, and after it for every call but
    `refusal` and `close`.
    """

    def __init__(self, channel: Channel, opened: Opened) -> None:
        self.name = opened.name
        self.engine_version = opened.engine_version
        self.facts = opened.facts
        self.config = opened.config
        self.n_ctx = opened.n_ctx
        self.capabilities = opened.capabilities
        self._refusals = opened.refusals
        self._can_abort = opened.can_abort
        self._verify_refusal = opened.verify_refusal
        self.verify_margin = opened.verify_margin
        self._channel = channel

    def refusal(self, operation: str) -> str | None:
        """Also of a session that is lost or closed."""
        if operation in self._refusals:
            return self._refusals[operation]
        self._channel.call(NoneType, "refusal", [operation])  # raises what the engine raises for such a name
        return None

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        return self._channel.call(Computed, "prefill", [tokens, tape_start])

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        """`choose` runs here: for each token the logits come and the token goes."""
        return self._channel.call(DecodeRun, "decode_until", [n, limit, tape_start, logits], choose=choose)

    def verify_refusal(self) -> str | None:
        """See `verifying.Verifier`. A host always has it: what it holds may not."""
        return self._verify_refusal

    def verify(self, tokens: Sequence[int], tape_start: int, keep: Keep) -> Verified:
        """`keep` runs here: the logits after each token come, and how many tokens stay goes."""
        if self._verify_refusal is not None:
            raise UnsupportedOperation("verify", self._verify_refusal)
        return self._channel.call(Verified, "verify", [tokens, tape_start], choose=keep)

    def truncate(self, tape_stop: int) -> None:
        self._channel.call(NoneType, "truncate", [tape_stop])

    def evict(self, start: int, stop: int) -> None:
        self._channel.call(NoneType, "evict", [start, stop])

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        self._channel.call(NoneType, "shift", [cache_start, cache_stop, delta])

    def export_block(self, start: int, stop: int) -> bytes:
        return self._channel.call(bytes, "export_block", [start, stop])

    def admit(self, block: bytes, start: int, cache_start: int) -> None:
        self._channel.call(NoneType, "admit", [block, start, cache_start])

    def refill(self, tokens: Sequence[int], start: int, cache_start: int) -> Computed:
        return self._channel.call(Computed, "refill", [tokens, start, cache_start])

    def rebuild(self, ranges: RangeSet, tokens: Sequence[int]) -> Computed:
        return self._channel.call(Computed, "rebuild", [ranges, tokens])

    def snapshot(self) -> bytes:
        return self._channel.call(bytes, "snapshot")

    def restore(self, snapshot: bytes) -> None:
        self._channel.call(NoneType, "restore", [snapshot])

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> AttentionMass:
        return self._channel.call(AttentionMass, "score", [tokens, tape_start, layers])

    def take_mass(self) -> AttentionMass:
        return self._channel.call(AttentionMass, "take_mass")

    def books(self) -> Layout:
        return self._channel.call(tuple, "books")

    def witness(self) -> Witness:
        return self._channel.call(Witness, "witness")

    def kv_bytes(self) -> dict[str, int]:
        return self._channel.call(dict, "kv_bytes")

    def abort_next(self) -> None:
        """Fault injection by the engine's own hook, in the host. Raises UnsupportedOperation where it has none."""
        if not self._can_abort:
            raise UnsupportedOperation("abort_next", f"{self.name} has no such hook")
        self._channel.call(NoneType, "abort_next")

    def cancel(self) -> None:
        self._channel.cancel()

    def close(self) -> None:
        self._channel.close()
