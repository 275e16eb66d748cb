"""How much is computed for one knob: sizes in tokens, the text, and what the measures therefore depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.backends.errors import UsageError

__all__ = ["FULL", "QUICK", "Sizes", "Smoke", "smoke_of"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """`context` tokens are computed, then `scored` ones predicted one by one. `needles` facts, each in
    `needle_tokens`. `range_tokens` of tape for the round trips. `shift_tokens` stream through a context of
    `shift_context`, four evicted at a time and all later keys rotated; the last `shift_scored` are compared.
    """

    context: int = 256
    scored: int = 256
    needles: int = 8
    needle_tokens: int = 400
    range_tokens: int = 192
    shift_context: int = 256
    shift_tokens: int = 1024
    shift_scored: int = 256
    chunk: int = 512

    @property
    def text_tokens(self) -> int:
        """Tokens of text that are needed."""
        return max(self.context + self.scored, self.range_tokens + 1, self.shift_tokens)


FULL = Sizes()
QUICK = Sizes(context=64, scored=64, needles=2, needle_tokens=200, range_tokens=96, shift_tokens=512, shift_scored=64)
"""For a look. What it finds is not kept: it is too little to advertise anything."""


@dataclass(frozen=True, slots=True)
class Smoke:
    """The text's tokens and the sizes."""

    tokens: tuple[int, ...]
    sizes: Sizes

    @property
    def settings(self) -> str:
        """What measures depend on, as text; the tokens by their digest."""
        s = self.sizes
        digest = hashlib.sha256(" ".join(map(str, self.tokens)).encode()).hexdigest()[:12]
        return (
            f"tokens={digest},context={s.context},scored={s.scored},needles={s.needles}x{s.needle_tokens},"
            f"range={s.range_tokens},shift={s.shift_tokens}/{s.shift_context}/{s.shift_scored},chunk={s.chunk},threads=1"
        )


def smoke_of(tokens: Sequence[int], sizes: Sizes, n_ctx_train: int) -> Smoke:
    """The first tokens of a text. Raises UsageError for one that is too short, or a model whose context is."""
    needed = sizes.text_tokens
    if len(tokens) < needed:
        raise UsageError(f"the text has {len(tokens)} tokens; certification needs {needed}: give a longer --text")
    longest = max(sizes.context + sizes.scored, sizes.needle_tokens, sizes.shift_context)
    if longest > n_ctx_train:
        raise UsageError(f"certification needs a context of {longest}; the model was trained on {n_ctx_train}")
    return Smoke(tuple(tokens[:needed]), sizes)
