"""Random sessions on f32 and f16 rows; those on other types are in `test_openvino_types`."""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import settings

from support.openvino_machine import Machine


class PlainMachine(Machine):
    pass


PlainMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestF32 = PlainMachine.TestCase


class HalfMachine(Machine):
    config: ClassVar[dict[str, Any]] = {"kv_type_k": "f16", "kv_type_v": "f16", "options": {"kv": "asked"}}
    model = "qwen3"


HalfMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestF16 = HalfMachine.TestCase
