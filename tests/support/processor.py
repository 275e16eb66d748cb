"""What this machine's processor cannot do: there kvtape refuses, and a test that meets the refusal ends with it."""

from __future__ import annotations

from kvtape.backends.openvino.runtime import core

__all__ = ["computes_bf16", "refused_here"]


def computes_bf16() -> bool:
    """Whether OpenVINO computes in bf16 on this processor, by its own account."""
    return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def refused_here(error: BaseException, *, bf16: bool | None = None) -> str | None:
    """The refusal that `error` is, where it is one of a session in bf16 on a processor without it; else None.

    `bf16`: whether this processor has it, asked of OpenVINO by default. Where it has, a refusal is a failure.
    """
    told = str(error)
    if "OpenVINO does not store" not in told or "inference bf16" not in told:
        return None
    return None if (computes_bf16() if bf16 is None else bf16) else told
