"""`boundary-kv`: `standard`, and a frame of the state whenever another `chunk` tokens are whole.

Contract: exact, bit-identical to `standard`: frames are made of the session and never read by it. A session that
`resume`s from its frames, in this process or another, goes on with the same bits; tokens past the last frame are given
again, and computed again. (On another machine's BLAS rows to come may differ in their last bits, as everywhere.)

`take_frames` hands over what was made since it was last asked, and keeps nothing of it but its digest.

Memory: that of `standard`, 4 bytes for each token of the open chunk, and the frames that nobody has taken yet: a second
copy of their keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvtape.backends.errors import StateRejected
from kvtape.backends.reference.engines.boundary_frame import BoundaryFrame, check_chain
from kvtape.backends.reference.engines.catalogue import EngineEntry
from kvtape.backends.reference.engines.engine import Contract, EngineInfo, Memory, MemoryKind
from kvtape.backends.reference.engines.session_engine import SessionEngine
from kvtape.backends.reference.errors import InvariantViolation
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.kv_rows import KvRows
from kvtape.backends.reference.model.tokens import Ids, checked_tokens
from kvtape.backends.reference.model.weights import Weights
from kvtape.planner.grammar import Option, OptionValue

__all__ = ["ENTRY", "BoundaryKvEngine"]


class _Chain:
    """Frames made so far: how many, the digest of the last, those not taken yet, and the tokens behind the last."""

    def __init__(self, n_frames: int = 0, last: str = "") -> None:
        self.n_frames, self.last = n_frames, last
        self.waiting: tuple[BoundaryFrame, ...] = ()
        self.open_ids: Ids = np.empty(0, np.int32)


class BoundaryKvEngine(SessionEngine):
    def __init__(self, info: EngineInfo, chunk: int) -> None:
        super().__init__(info)
        self._chunk = chunk
        self._rows: KvRows | None = None
        self._chain = _Chain()

    def memory(self) -> Memory:
        rows, ids = self._rows, self._chain.open_ids.nbytes
        frames = sum(frame.nbytes for frame in self._chain.waiting)
        kv = MemoryKind("kv", rows.occupied_bytes, rows.allocated_bytes) if rows else MemoryKind("kv", 0, 0)
        kinds = (kv, MemoryKind("tokens", ids, ids), MemoryKind("frames", frames, frames, cold=True))
        return Memory(self._n_tokens, self._n_tokens, kinds)

    def read_kv_row(self, layer: int, position: int) -> tuple[Floats, Floats] | None:
        self._check_layer(layer)
        return self._rows.row(layer, position) if self._rows else None

    def take_frames(self) -> tuple[BoundaryFrame, ...]:
        """The frames that nobody has taken yet, in order; they are the caller's then. A prefill forgets them."""
        taken, self._chain.waiting = self._chain.waiting, ()
        return taken

    def resume(
        self, weights: Weights, ffn: FfnRouter, frames: Sequence[BoundaryFrame], tokens: Sequence[int] = ()
    ) -> Floats:
        """Begin with the state of `frames` and compute `tokens` behind it: the last row, as `prefill` gives it.

        Later frames continue the chain. Raises StateRejected for no frames, a broken chain, frames of other weights or
        another chunk size, and what `prefill` raises; the session that there was is left as it is then.
        """
        if not frames:
            raise StateRejected("no frames to resume from; prefill the prompt instead")
        check_chain(frames, weights)
        if any(len(frame.tokens) != self._chunk for frame in frames):
            raise StateRejected(
                f"the frames are not of {self._chunk} tokens each; resume with the chunk they were made by"
            )
        ids = checked_tokens(tokens, weights.n_vocab) if len(tokens) else np.empty(0, np.int32)
        with self._new_session():
            rows, start = _rows_of(frames, weights), frames[-1].stop
            chain = _Chain(len(frames), frames[-1].digest)
            hidden = self._extend(weights, ffn, ids, start, rows, chain) if len(ids) else frames[-1].hidden.copy()
            self._count("rows_resumed", start)
            self._take_over(rows, chain)
            self._bind(weights, start + len(ids))
            return hidden[-1:]

    def _begin(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        rows, chain = KvRows(weights), _Chain()
        hidden = self._extend(weights, ffn, ids, 0, rows, chain)
        self._take_over(rows, chain)
        return hidden[-1:]

    def _step(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        assert self._rows is not None
        return self._extend(weights, ffn, ids, self._n_tokens, self._rows, self._chain)

    def _rewind(self) -> None:
        assert self._rows is not None
        self._rows.truncate(self._n_tokens)
        n = self._chain.n_frames * self._chunk + len(self._chain.open_ids)
        if n != self._n_tokens or any(layer.n_rows != n for layer in self._rows.layers):
            raise InvariantViolation(f"a layer, or the frames, do not hold {self._n_tokens} tokens")

    def _extend(self, weights: Weights, ffn: FfnRouter, ids: Ids, start: int, rows: KvRows, chain: _Chain) -> Floats:
        """All rows of `ids`; `chain` gains the frames of the chunks that are whole then, all of them or none."""
        hidden = self._advance(weights, ffn, ids, start, rows)
        open_ids = np.concatenate([chain.open_ids, ids])
        n_frames, last, made = chain.n_frames, chain.last, []
        while len(open_ids) >= self._chunk:
            at = n_frames * self._chunk
            row = hidden[at + self._chunk - 1 - start][None].copy()
            keys, values = _stacked(rows, at, at + self._chunk)
            frame = BoundaryFrame(
                weights.architecture.shape.fingerprint,
                n_frames,
                at,
                open_ids[: self._chunk].copy(),
                row,
                keys,
                values,
                last,
            )
            made.append(frame)
            n_frames, last, open_ids = n_frames + 1, frame.digest, open_ids[self._chunk :].copy()
        chain.n_frames, chain.last, chain.open_ids = n_frames, last, open_ids
        chain.waiting = (*chain.waiting, *made)
        self._count("frames_made", len(made))
        return hidden[-1:]

    def _take_over(self, rows: KvRows, chain: _Chain) -> None:
        self._rows, self._chain = rows, chain


def _stacked(rows: KvRows, start: int, stop: int) -> tuple[Floats, Floats]:
    parts = [store.rows(start, stop) for store in rows.layers]
    return np.stack([keys for _, keys, _ in parts]), np.stack([values for _, _, values in parts])


def _rows_of(frames: Sequence[BoundaryFrame], weights: Weights) -> KvRows:
    rows = KvRows(weights)
    positions = np.arange(frames[-1].stop, dtype=np.int64)
    for layer, store in enumerate(rows.layers):
        keys = np.concatenate([frame.keys[layer] for frame in frames])
        store.append(positions, keys, np.concatenate([frame.values[layer] for frame in frames]))
    return rows


def _make(info: EngineInfo, options: Mapping[str, OptionValue]) -> BoundaryKvEngine:
    return BoundaryKvEngine(info, int(options["chunk"] or 0))


ENTRY = EngineEntry(
    name="boundary-kv",
    options={"chunk": Option(int, 512, (1, None))},
    contract=Contract.EXACT,
    make=_make,
    about="standard, with a frame of the state every chunk of tokens, from which a session can be resumed",
)
