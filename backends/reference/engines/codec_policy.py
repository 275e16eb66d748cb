"""Which codec writes the cold rows of which layer: `bf16`, or runs of layers as in `bf16x2+q8_0x26+f32`.

The first run takes the first layers; the last one may leave its number out, and takes all that are left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvtape.backends.errors import UsageError
from kvtape.backends.reference.engines.row_codecs import CODECS, RowCodec

__all__ = ["CodecPolicy", "parse_codec_policy"]

_NUMBER: Final = re.compile(r"x([1-9][0-9]{0,3})$")


@dataclass(frozen=True, slots=True)
class CodecPolicy:
    """`runs`: codec and number of layers, in the order of the layers; 0 (last run only) for all that are left."""

    runs: tuple[tuple[RowCodec, int], ...]

    def of(self, n_layer: int) -> tuple[RowCodec, ...]:
        """The codec of each layer. Only for a model without an `obstacle`."""
        codecs = [codec for codec, n in self.runs for _ in range(n)]
        return (*codecs, *[self.runs[-1][0]] * (n_layer - len(codecs)))

    def obstacle(self, n_layer: int, n_embd: int) -> str | None:
        """Why the policy does not fit a model; None where it does."""
        named = sum(n for _, n in self.runs)
        if named > n_layer or (named < n_layer and self.runs[-1][1]):
            return f"the codecs {self} are for {named} layers, and the model has {n_layer}"
        for codec, _ in self.runs:
            if n_embd % codec.block:
                return f"{codec.name} writes blocks of {codec.block}, and rows have {n_embd} components"
        return None

    def __str__(self) -> str:
        return "+".join(f"{codec.name}x{n}" if n else codec.name for codec, n in self.runs)


def parse_codec_policy(text: str) -> CodecPolicy:
    """Raises UsageError for what is not understood, with the codecs that there are."""
    parts = text.split("+")
    return CodecPolicy(tuple(_run(text, part, last=i == len(parts) - 1) for i, part in enumerate(parts)))


def _run(text: str, part: str, *, last: bool) -> tuple[RowCodec, int]:
    number = _NUMBER.search(part)
    name = part[: number.start()] if number else part
    if name not in CODECS:
        raise UsageError(f"codecs {text!r}: unknown codec {name!r}; allowed: {', '.join(sorted(CODECS))}")
    if not number and not last:
        raise UsageError(
            f"codecs {text!r}: {name} needs a number of layers, as in {name}x2; only the last may go without"
        )
    return CODECS[name], int(number[1]) if number else 0
