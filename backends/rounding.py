"""What rounding alone does: how far a stored row is from the one that was computed, and who rounds rows to compute."""

from __future__ import annotations

from typing import Final

__all__ = ["PACKED_TYPES", "ROUNDING", "ROUND_TO_MULTIPLY"]

ROUNDING: Final = {
    "bf16": 0.004,
    "f16": 0.0005,
    "f32": 0.0,
    "f64": 0.0,
    "iq4_nl": 0.12,
    "q4_0": 0.125,
    "q4_1": 0.115,
    "q5_0": 0.07,
    "q5_1": 0.06,
    "q8_0": 0.012,
}
"""Storage type -> bound of the relative distance (Euclidean, of one row over all its heads) that one rounding makes.

Measured on rows of one 64-wide head, the least there is to average over, and raised by a tenth or two: q8_0 0.007, q5_1
0.048, q5_0 0.056, q4_1 0.093, q4_0 0.111, iq4_nl 0.097. A step of b bits over +-2.5 sigma gives the same: q8_0 0.006.
"""

PACKED_TYPES: Final = frozenset(ROUNDING) - {"bf16", "f16", "f32", "f64"}
"""Those that keep blocks of numbers with a common scale."""

ROUND_TO_MULTIPLY: Final = frozenset({"llama"})
"""Engines that round rows to 8 bits before they multiply them with packed weights. OpenVINO unpacks the weights."""
