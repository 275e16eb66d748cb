"""What the engine says in its log of a context that it has created, and says nowhere else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EngineWords", "read_words"]

_BUFFER = re.compile(r"(?:KV|RS) buffer size =\s*([0-9.]+) MiB")
_FLASH = re.compile(r"flash_attn\s*= (enabled|disabled|auto)$")
_FLASH_FOUND = re.compile(r"Flash Attention (?:was |is )?(enabled|not supported, set to disabled)$")
_SPREAD = re.compile(r"attn_rot_([kv]) = ([01])")


@dataclass(frozen=True, slots=True)
class EngineWords:
    """`allocated_bytes` of the caches, each rounded to 0.01 MiB. `flash_attention`: whether it runs; None where the log
    does not say. `spread_keys`, `spread_values`: of each cache, whether it stores them multiplied by a Hadamard matrix.
    """

    allocated_bytes: int
    flash_attention: bool | None
    spread_keys: tuple[bool, ...]
    spread_values: tuple[bool, ...]


def read_words(lines: Sequence[str]) -> EngineWords:
    """`lines` from the creation of one context."""
    text = "\n".join(lines)
    sizes = _BUFFER.findall(text)
    spread = _SPREAD.findall(text)
    return EngineWords(
        allocated_bytes=round(sum(float(size) for size in sizes) * 2**20),
        flash_attention=_flash(lines),
        spread_keys=tuple(bit == "1" for what, bit in spread if what == "k"),
        spread_values=tuple(bit == "1" for what, bit in spread if what == "v"),
    )


def _flash(lines: Sequence[str]) -> bool | None:
    """The last word counts: `auto` is followed by what was found, and a line before it may be taken back."""
    said: bool | None = None
    for line in lines:
        if match := _FLASH.search(line):
            said = {"enabled": True, "disabled": False, "auto": None}[match[1]]
        elif match := _FLASH_FOUND.search(line):
            said = match[1] == "enabled"
    return said
