"""The one OpenVINO runtime of this process."""

from __future__ import annotations

import functools
from typing import Any

import openvino as ov

__all__ = ["core"]


@functools.cache
def core() -> Any:
    """Made on first use, shared by everybody."""
    return ov.Core()
