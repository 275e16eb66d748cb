"""--kv-type, --flash and --uncertified: what they make of a session's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from kvtape.backends.protocol import SessionConfig
from kvtape.cli.precision import with_precision

PLAIN = SessionConfig()


@pytest.mark.parametrize(
    ("engine", "kv_type", "options", "types", "effective"),
    [
        ("llama", None, {}, ("f16", "f16"), {}),
        ("openvino", None, {}, ("f16", "f16"), {}),
        ("llama", "q8_0/f16", {}, ("q8_0", "f16"), {}),
        ("openvino", "u8", {}, ("u8", "u8"), {"kv": "asked"}),
        ("openvino", "u8/f32", {"mirror": "on"}, ("u8", "f32"), {"kv": "asked", "mirror": "on"}),
        ("openvino", "u8", {"kv": "auto"}, ("u8", "u8"), {"kv": "auto"}),
    ],
)
def test_a_type_that_is_named_is_stored(
    engine: str, kv_type: str | None, options: dict[str, str], types: tuple[str, str], effective: dict[str, Any]
) -> None:
    """OpenVINO takes the types of defaults and logs for advice; one on the command line is meant."""
    config = with_precision(engine, SessionConfig(options=options), kv_type, None, uncertified=False)
    assert (config.kv_type_k, config.kv_type_v, config.options) == (*types, effective)
    assert not config.uncertified


def test_nothing_asked_changes_nothing_and_flash_is_passed_on() -> None:
    assert with_precision("llama", PLAIN, None, None, uncertified=False) == PLAIN
    asked = with_precision("llama", PLAIN, None, "auto", uncertified=True)
    assert (asked.flash_attention, asked.uncertified) == ("auto", True)
