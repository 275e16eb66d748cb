"""The wrappers on a `llama_cpp.Llama` and its context: each calls through, then tells a follower what happened."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from kvtape.backends.llama.bystander import Bystander
from kvtape.backends.protocol import Clock
from kvtape.serve.taping.account import Took
from kvtape.serve.taping.guard import Guard
from kvtape.serve.taping.llama import Follower, Offer
from kvtape.serve.taping.patching import Patches

__all__ = ["wrap"]

_TOO_LONG = re.compile(r"Requested tokens \((\d+)\) exceed context window of (\d+)")


def wrap(llama: Any, engine: Bystander, follower: Follower, guard: Guard, clock: Clock, patches: Patches) -> None:
    """Put every wrapper in place; `patches` takes them away again."""
    calls = _Calls(llama, engine, follower, guard, clock)
    for name, make in (
        ("_create_completion", calls.completion),
        ("embed", calls.embed),
        ("eval", calls.eval),
        ("generate", calls.generate),
        ("load_state", calls.load_state),
        ("reset", calls.reset),
        ("sample", calls.sample),
        ("save_state", calls.save_state),
    ):
        patches.put(llama, name, make)
    for name, make in (
        ("decode", calls.decode),
        ("kv_cache_clear", calls.clear),
        ("kv_cache_seq_cp", calls.copy),
        ("kv_cache_seq_keep", calls.keep),
        ("kv_cache_seq_rm", calls.remove),
        ("kv_cache_seq_shift", calls.shift),
    ):
        patches.put(llama._ctx, name, make)


class _Calls:
    """One method for each that is wrapped: from the original to its wrapper."""

    def __init__(self, llama: Any, engine: Bystander, follower: Follower, guard: Guard, clock: Clock) -> None:
        self._llama, self._engine, self._follower, self._guard, self._clock = llama, engine, follower, guard, clock
        self._inside: list[str] = []
        self._completing: tuple[int | None] | None = None
        """The `max_tokens` of a completion that has begun and not yet called `generate`."""

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        """A call of `Llama` that makes others: those are part of it."""
        with self._guard.call(what):
            self._inside.append(what)
            try:
                yield
            finally:
                self._inside.pop()

    def _since(self, began_ns: int) -> Took:
        return Took(began_ns, self._clock.now_ns() - began_ns)

    # -- Llama -----------------------------------------------------------------------------------------------------

    def completion(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Any]:
        def _create_completion(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            self._completing = (kwargs.get("max_tokens"),)
            try:
                return (yield from original(*args, **kwargs))
            except ValueError as err:
                self._refused(err)
                raise

        return _create_completion

    def _refused(self, err: ValueError) -> None:
        found = _TOO_LONG.match(str(err))
        if found:
            needed, available = found.groups()
            with self._guard.call("create_completion"):
                why = f"{needed} tokens do not fit a context of {available}"
                self._guard.note(self._follower.refused, why, "ContextOverflow")

    def generate(self, original: Callable[..., Generator[int, Any, None]]) -> Callable[..., Any]:
        def generate(tokens: Any, *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
            tokens = list(tokens)
            whole = bool(kwargs.get("reset", args[6] if len(args) > 6 else True))
            offer = Offer(tuple(int(t) for t in tokens), whole, most=self._limit(len(tokens)))
            steps = original(tokens, *args, **kwargs)
            sent, begun = None, False
            try:
                while True:
                    with self._within("generate"):
                        if not begun:
                            self._guard.note(self._follower.begin, offer)
                            begun = True
                        try:
                            token = steps.send(sent)
                        except StopIteration:
                            return
                    sent = yield token
            finally:
                steps.close()

        return generate

    def _limit(self, n_prompt: int) -> int | None:
        """How many tokens the completion that now begins may give out; None for a bare `generate`."""
        completing, self._completing = self._completing, None
        if completing is None:
            return None
        (asked,), room = completing, max(0, self._engine.n_ctx - n_prompt)
        return room if asked is None or asked <= 0 else min(asked, room)

    def eval(self, original: Callable[..., None]) -> Callable[..., None]:
        def evaluate(tokens: Any) -> None:
            outer = not self._inside
            with self._within("eval"):
                if outer:
                    self._guard.note(lambda: self._follower.evaluate([int(t) for t in tokens]))
                original(tokens)

        return evaluate

    def sample(self, original: Callable[..., int]) -> Callable[..., int]:
        def sample(*args: Any, **kwargs: Any) -> int:
            with self._within("sample"):
                token = original(*args, **kwargs)
                self._guard.note(lambda: self._follower.sampled(int(token)))
                return token

        return sample

    def reset(self, original: Callable[[], None]) -> Callable[[], None]:
        def reset() -> None:
            outer = not self._inside
            with self._within("reset"):
                began = self._clock.now_ns()
                original()
                reason = "reset" if outer else "diverged"
                if self._engine.recurrent or self._engine.hybrid:  # there it empties the memory at once
                    self._guard.note(self._follower.cleared, reason, self._since(began))
                elif outer:
                    self._guard.note(self._follower.because, reason)

        return reset

    def embed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def embed(*args: Any, **kwargs: Any) -> Any:
            with self._within("embed"):
                return original(*args, **kwargs)

        return embed

    def save_state(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def save_state() -> Any:
            with self._within("save_state"):
                began = self._clock.now_ns()
                state = original()
                self._guard.note(self._follower.saved, state, self._since(began))
                return state

        return save_state

    def load_state(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def load_state(state: Any) -> None:
            with self._within("load_state"):
                began = self._clock.now_ns()
                original(state)
                self._guard.note(self._follower.loaded, state, self._since(began))

        return load_state

    # -- LlamaContext ----------------------------------------------------------------------------------------------

    def decode(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def decode(batch: Any) -> None:
            with self._within("decode"):
                began = self._clock.now_ns()
                try:
                    original(batch)
                except BaseException as err:
                    took, cause = self._since(began), err
                    self._guard.note(lambda: self._follower.failed(self._engine.fed(batch), took, cause))
                    raise
                took = self._since(began)
                self._guard.note(lambda: self._follower.computed(self._engine.fed(batch), took))

        return decode

    def remove(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def kv_cache_seq_rm(seq_id: int, p0: int, p1: int) -> bool:
            with self._within("kv_cache_seq_rm"):
                began = self._clock.now_ns()
                done = original(seq_id, p0, p1)
                if seq_id <= 0:
                    self._guard.note(self._follower.removed, p0, p1, self._since(began), done=bool(done))
                return done

        return kv_cache_seq_rm

    def clear(self, original: Callable[[], None]) -> Callable[[], None]:
        def kv_cache_clear() -> None:
            reason = "embed" if "embed" in self._inside else "cleared"
            with self._within("kv_cache_clear"):
                began = self._clock.now_ns()
                original()
                self._guard.note(self._follower.cleared, reason, self._since(began))

        return kv_cache_clear

    def shift(self, original: Callable[..., None]) -> Callable[..., None]:
        def kv_cache_seq_shift(seq_id: int, p0: int, p1: int, shift: int) -> None:
            with self._within("kv_cache_seq_shift"):
                began = self._clock.now_ns()
                original(seq_id, p0, p1, shift)
                if seq_id == 0:
                    self._guard.note(self._follower.shifted, p0, p1, shift, self._since(began))

        return kv_cache_seq_shift

    def copy(self, original: Callable[..., None]) -> Callable[..., None]:
        def kv_cache_seq_cp(seq_id_src: int, seq_id_dst: int, p0: int, p1: int) -> None:
            with self._within("kv_cache_seq_cp"):
                original(seq_id_src, seq_id_dst, p0, p1)
                if seq_id_src != seq_id_dst:
                    self._guard.note(self._follower.outside, "kv_cache_seq_cp")

        return kv_cache_seq_cp

    def keep(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def kv_cache_seq_keep(seq_id: int) -> None:
            with self._within("kv_cache_seq_keep"):
                began = self._clock.now_ns()
                original(seq_id)
                if seq_id != 0:
                    self._guard.note(self._follower.cleared, "asked", self._since(began))

        return kv_cache_seq_keep
