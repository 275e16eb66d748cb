"""Options of the commands that open sessions: how keys and values are stored, and what is allowed without proof."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvtape.backends.protocol import SessionConfig

__all__ = ["Flash", "KvType", "Uncertified", "as_asked", "with_precision"]

KvType = Annotated[
    str | None,
    typer.Option(
        "--kv-type",
        metavar="K[/V]",
        help="Storage of keys and values, like q8_0 or q8_0/f16. Default: f16; openvino: f32.",
        show_default=False,
    ),
]
Flash = Annotated[
    str | None,
    typer.Option("--flash", metavar="on|off|auto", help="Flash attention of llama. Default: off.", show_default=False),
]
Uncertified = Annotated[
    bool, typer.Option("--uncertified", help="Take a storage that no passing row of kvtape certify advertises.")
]


def with_precision(
    engine: str, config: SessionConfig, kv_type: str | None, flash: str | None, *, uncertified: bool
) -> SessionConfig:
    """`config` with what was asked, what was not left as it is. OpenVINO, which stores f32 whatever a log or a default
    says, stores a type that was named here (`kv=asked`), unless its options say otherwise.

    Raises UsageError for text that is no type; whether an engine has the type, it says itself.
    """
    from dataclasses import replace

    from kvtape.eval.certification.catalog import parse_kv_type

    said: dict[str, Any] = {"uncertified": uncertified}
    if kv_type is not None:
        k, v = parse_kv_type(kv_type)
        said |= {"kv_type_k": k, "kv_type_v": v}
        if engine == "openvino":
            said["options"] = {"kv": "asked"} | config.options
    if flash is not None:
        said |= {"flash_attention": flash}
    return replace(config, **said)


def as_asked(kv_type: str | None, flash: str | None, *, uncertified: bool) -> dict[str, Any]:
    """What stands in the configuration of a run: only what was given."""
    asked = {"kv_type": kv_type, "flash": flash, "uncertified": uncertified or None}
    return {name: value for name, value in asked.items() if value is not None}
