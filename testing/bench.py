"""One backend on the bench: operations are carried out, and after each the books and the memory are asked.

What is expected follows from the protocol and from `planner.layout` alone. Which token a row holds is read from its
layer-0 key, which depends on the token and its cache position only: `KeyReference` lets a fresh session of the same
backend compute that token at that position, by nothing but a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.protocol import Backend, Computed, DecodeRun, Logits, SessionConfig
from kvtape.backends.rounding import ROUNDING
from kvtape.planner import layout as lay
from kvtape.planner.layout import Layout, normalise
from kvtape.planner.ranges import RangeSet

__all__ = ["Bench", "Factory", "Image", "KeyReference", "NotApplicable", "NotConforming", "as_runs"]

Factory = Callable[[SessionConfig], Backend]
"""Opens a session of the backend under test with this configuration."""

Result = TypeVar("Result")
Image = dict[int, tuple[bytes, ...]]
"""By cache position: the bytes of the row's keys and values, layer by layer."""

IDENTITY_TOLERANCE = 0.02
"""Relative distance of a layer-0 key; f16 storage and rotation stay below 0.002, another token is about 1 away. Where
one rounding of the stored type moves a row by more than half of this, twice that: a moved key was rounded again."""

LOGITS_TOLERANCE = 0.02
"""Largest difference of logits that must agree, in standard deviations of the logits."""

COARSE_LOGITS_TOLERANCE = 0.05
"""The same where keys or values keep fewer digits than f16. A token may see its own chunk's rows before they were
rounded and older ones after, so two ways of cutting one prefill differ: by 0.022 on OpenVINO with bf16 inference."""

_FINE = frozenset({"f64", "f32", "f16"})


class NotConforming(AssertionError):
    """The backend does not do what the protocol says."""


class NotApplicable(Exception):
    """The scenario has nothing to ask of this backend; says why."""


class KeyReference:
    """Layer-0 keys by (token, cache position), computed by fresh sessions of `factory` when first asked for."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._keys: dict[tuple[int, int], npt.NDArray[np.float64]] = {}

    def keys(self, config: SessionConfig, pairs: Sequence[tuple[int, int]]) -> npt.NDArray[np.float64]:
        """Keys float64 `[n, width]` of these (token, cache position) pairs, no two at one position."""
        missing = {position: token for token, position in pairs if (token, position) not in self._keys}
        if missing:
            self._compute(replace(config, n_ctx=max(config.n_ctx, max(missing) + 1)), missing)
        return np.stack([self._keys[pair] for pair in pairs])

    def _compute(self, config: SessionConfig, tokens: dict[int, int]) -> None:
        filler = next(iter(tokens.values()))
        sequence = [tokens.get(position, filler) for position in range(max(tokens) + 1)]
        backend = self._factory(config)
        try:
            backend.prefill(sequence, 0)
            seen = backend.witness()
        finally:
            backend.close()
        for position, row in zip(seen.cache_positions.tolist(), seen.rows.keys[0], strict=True):
            self._keys[sequence[position], position] = row.astype(np.float64)


class Bench:
    """A session under test with what it must hold: the expected layout and the tape's tokens."""

    def __init__(self, factory: Factory, reference: KeyReference, config: SessionConfig) -> None:
        self._factory, self._reference, self.config = factory, reference, config
        self.backend = factory(config)
        self.layout: Layout = ()
        self.tape: list[int] = []
        self.logits: Logits = np.empty(0, np.float32)

    def close(self) -> None:
        self.backend.close()

    def twin(self) -> Bench:
        """A second session of the same configuration, empty."""
        return Bench(self._factory, self._reference, self.config)

    def draw(self, n: int, seed: int = 0) -> list[int]:
        """`n` token ids of the model that end nothing, the same for one seed."""
        facts = self.backend.facts
        allowed = [t for t in range(min(3, facts.n_vocab - 1), min(facts.n_vocab, 259)) if t not in facts.end_tokens]
        return [allowed[i] for i in np.random.default_rng(seed).integers(0, len(allowed), n).tolist()]

    @property
    def places(self) -> dict[int, int]:
        """By cache position: the tape position that must stand there."""
        return {s.cache_start + i: s.tape_start + i for s in self.layout for i in range(s.length)}

    def abort_hook(self) -> Callable[[], object]:
        """The backend's own way to make its next computation fail. Raises NotApplicable where it has none."""
        abort_next: Callable[[], object] | None = getattr(self.backend, "abort_next", None)
        if abort_next is None:
            raise NotApplicable("the backend has no hook abort_next() that makes its next computation fail")
        return abort_next

    # -- operations, each with its check --------------------------------------------------------------------------

    def feed(self, tokens: Sequence[int]) -> Computed:
        """Prefill at the tape's end."""
        start = len(self.tape)
        what = f"prefill of {len(tokens)} tokens at {start}"
        computed = self.does(what, lambda: self.backend.prefill(tokens, start))
        self.tape += tokens
        self.layout = lay.append(self.layout, start, len(tokens), lay.next_cache_position(self.layout))
        self._check_computed(what, computed, len(tokens))
        self.check(what)
        return computed

    def decode(self, tokens: Sequence[int]) -> DecodeRun:
        """Decode exactly `tokens`, forced."""
        start = len(self.tape)
        forced = iter(tokens)
        what = f"decode_until of {len(tokens)} tokens at {start}"
        limit = self.backend.n_ctx
        run = self.does(
            what, lambda: self.backend.decode_until(len(tokens), limit, start, self.logits, lambda _: next(forced))
        )
        if (run.tokens, run.stopped) != (tuple(tokens), "n"):
            self.fail(f"{what}: gave {run.tokens} and stopped={run.stopped!r}, expected {tuple(tokens)} and 'n'")
        self.tape += tokens
        self.layout = lay.append(self.layout, start, len(tokens), lay.next_cache_position(self.layout))
        self._check_logits(what, run.logits)
        self.check(what)
        return run

    def evict(self, start: int, stop: int) -> None:
        before = self.image()
        what = f"evict of [{start}, {stop})"
        self.does(what, lambda: self.backend.evict(start, stop), "remove_middle")
        self.layout = lay.remove(self.layout, start, stop)
        self.check(what)
        self._check_untouched(what, before)

    def truncate(self, tape_stop: int) -> None:
        before = self.image()
        what = f"truncate at {tape_stop}"
        self.does(what, lambda: self.backend.truncate(tape_stop), "remove_tail")
        self.layout = lay.cut(self.layout, tape_stop)
        del self.tape[tape_stop:]
        self.check(what)
        self._check_untouched(what, before)

    def shift(self, start: int, stop: int, delta: int) -> None:
        what = f"shift of cache [{start}, {stop}) by {delta}"
        self.does(what, lambda: self.backend.shift(start, stop, delta), "position_shift")
        self.layout = lay.shift(self.layout, start, stop, delta)
        self.check(what)

    def export(self, start: int, stop: int) -> bytes:
        before = self.image()
        what = f"export_block of [{start}, {stop})"
        blob = self.does(what, lambda: self.backend.export_block(start, stop), "cold_store")
        self.check(what)
        self._check_untouched(what, before)
        return blob

    def admit(self, blob: bytes, start: int, n: int, cache_start: int) -> None:
        what = f"admit of [{start}, {start + n}) at cache {cache_start}"
        self.does(what, lambda: self.backend.admit(blob, start, cache_start), "cold_store")
        self.layout = lay.append(self.layout, start, n, cache_start)
        self.check(what)

    def refill(self, start: int, stop: int, cache_start: int) -> None:
        tokens = self.tape[start:stop]
        what = f"refill of [{start}, {stop}) at cache {cache_start}"
        computed = self.does(what, lambda: self.backend.refill(tokens, start, cache_start), "recompute_range")
        self.layout = lay.append(self.layout, start, stop - start, cache_start)
        if computed.tokens != stop - start:
            self.fail(f"{what}: says it computed {computed.tokens} tokens, expected {stop - start}")
        self.check(what)

    def rebuild(self, ranges: RangeSet) -> Computed:
        tokens = [self.tape[p] for r in ranges for p in range(r.start, r.stop)]
        what = f"rebuild from {ranges.as_pairs()}"
        computed = self.does(what, lambda: self.backend.rebuild(ranges, tokens))
        self.layout = lay.rank_layout(ranges)
        if tokens:
            self._check_computed(what, computed, len(tokens))
        self.check(what)
        return computed

    # -- what is asked of every operation -------------------------------------------------------------------------

    def fail(self, why: str) -> NoReturn:
        raise NotConforming(why)

    def does(self, what: str, call: Callable[[], Result], capability: str | None = None) -> Result:
        """The operation must work; `capability` is the flag that promises it."""
        try:
            return call()
        except Exception as err:
            promise = f", although {capability} is true" if capability else ""
            raise NotConforming(f"{what}: raised {type(err).__name__}{promise}: {err}") from err

    def refuses(self, what: str, call: Callable[[], Any], *errors: type[Exception]) -> Exception:
        """The operation must raise one of `errors` and leave books and memory as they are."""
        books, rows = normalise(self.backend.books()), self.image()
        wanted = " or ".join(e.__name__ for e in errors)
        raised: Exception | None = None
        try:
            call()
        except errors as err:
            raised = err
        except Exception as err:
            raise NotConforming(f"{what}: raised {type(err).__name__} ({err}), must raise {wanted}") from err
        if raised is None:
            self.fail(f"{what}: was accepted, must raise {wanted}")
        if normalise(self.backend.books()) != books:
            self.fail(f"{what}: was refused, but the books changed to {_shown(self.backend.books())}")
        after = self.image()
        if sorted(after) != sorted(rows):
            self.fail(f"{what}: was refused, but the memory changed: rows at {as_runs(after)}, before {as_runs(rows)}")
        if after != rows:
            self.fail(f"{what}: was refused, but rows of the memory changed")
        return raised

    def check(self, what: str) -> None:
        """Books, positions, rows in every layer, and the token of every row are as expected."""
        try:
            books = normalise(self.backend.books())
        except ValueError as err:
            raise NotConforming(f"after {what}: the books are no layout: {err}") from None
        if books != self.layout:
            self.fail(f"after {what}: the books hold {_shown(books)}, expected {_shown(self.layout)}")
        try:
            seen = self.backend.witness()
        except UnsupportedOperation:
            return
        places = self.places
        found = seen.cache_positions.tolist()
        if sorted(found) != sorted(places):
            self.fail(f"after {what}: the memory has rows at {as_runs(found)}, expected {as_runs(places)}")
        for part in ("keys", "values"):
            for layer, rows in enumerate(getattr(seen.rows, part)):
                if len(rows) != len(places):
                    self.fail(f"after {what}: layer {layer} has {len(rows)} rows of {part}, expected {len(places)}")
        # Of a windowed model the witness shows the layers of full attention, and layer 0 need not be one of them.
        if found and seen.rows.keys and not self.backend.capabilities.sliding_window_attention_tokens:
            self._check_identity(what, seen.rows.keys[0], found, places)

    def image(self) -> Image:
        """Every row of the memory, to the bit."""
        try:
            seen = self.backend.witness()
        except UnsupportedOperation:
            return {}
        layers = (*seen.rows.keys, *seen.rows.values)
        return {
            p: tuple(a[i].tobytes() for a in layers if i < len(a)) for i, p in enumerate(seen.cache_positions.tolist())
        }

    def same_logits(self, what: str, got: Logits, expected: Logits) -> None:
        worst = float(np.abs(got - expected).max() / (expected.std() or 1.0))
        kept = self.backend.config
        tolerance = LOGITS_TOLERANCE if {kept.kv_type_k, kept.kv_type_v} <= _FINE else COARSE_LOGITS_TOLERANCE
        if not worst <= tolerance:
            self.fail(f"{what}: logits are {worst:.3g} standard deviations off (tolerance {tolerance})")

    def _check_identity(self, what: str, rows: npt.NDArray[Any], found: list[int], places: dict[int, int]) -> None:
        pairs = [(self.tape[places[c]], c) for c in found]
        expected = self._reference.keys(self.config, pairs)
        apart = np.linalg.norm(rows - expected, axis=1) / np.linalg.norm(expected, axis=1)
        tolerance = max(IDENTITY_TOLERANCE, 2 * ROUNDING.get(self.backend.config.kv_type_k, 0.0))
        if (apart <= tolerance).all():
            return
        i = int(np.flatnonzero(~(apart <= tolerance))[0])
        token, cache = pairs[i]
        self.fail(
            f"after {what}: the row at cache {cache} does not hold token {token} of tape {places[cache]}: "
            f"its layer-0 key is {apart[i]:.3g} away from that token's key there"
        )

    def _check_untouched(self, what: str, before: Image) -> None:
        changed = [p for p, row in self.image().items() if before.get(p) != row]
        if changed:
            self.fail(f"{what}: rows that stay must not change, those at {as_runs(changed)} did")

    def _check_computed(self, what: str, computed: Computed, n: int) -> None:
        if computed.tokens != n or not 1 <= computed.calls <= n:
            self.fail(f"{what}: says {computed.tokens} tokens in {computed.calls} calls, expected {n} tokens")
        self._check_logits(what, computed.logits)

    def _check_logits(self, what: str, logits: Logits) -> None:
        n_vocab = self.backend.facts.n_vocab
        if logits.dtype != np.float32 or logits.shape != (n_vocab,) or not np.isfinite(logits).all():
            self.fail(f"{what}: logits are {logits.dtype} {logits.shape}, expected finite float32 ({n_vocab},)")
        # A copy: an engine may lend out its own buffer.
        self.logits = logits.copy()


def as_runs(positions: Any) -> str:
    """Positions as text: `[0, 4) [6, 9)`."""
    ordered = sorted(positions)
    if not ordered:
        return "none"
    edges = [i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1]
    starts, stops = [0, *edges], [*edges, len(ordered)]
    return " ".join(f"[{ordered[a]}, {ordered[b - 1] + 1})" for a, b in zip(starts, stops, strict=True))


def _shown(layout: Layout) -> str:
    runs = (f"tape [{s.tape_start}, {s.tape_stop}) at cache {s.cache_start}" for s in layout)
    return ", ".join(runs) or "nothing"
