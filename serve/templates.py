"""A model's chat template, rendered in jinja2's sandbox: the template is part of a file that somebody else made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvtape.serve.requests import BadPrompt

__all__ = ["ChatTemplate"]

_LONGEST = 8 * 1024 * 1024
"""Characters that a rendered chat may have; a template that loops would fill the memory."""


class ChatTemplate:
    """`source` as transformers' tokenizers have them: `messages`, `tools`, `add_generation_prompt`, `bos_token`,
    `eos_token`, `raise_exception`. There is no `strftime_now`: a prompt that changes by the day is no prefix, and
    templates that ask for it have a fixed day to fall back on.
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, bos_token=bos, eos_token=eos)
        try:
            self._template = environment.from_string(source)
        except TemplateError as err:
            raise BadPrompt(f"the model's chat template cannot be read: {err}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, cue: bool) -> str:
        """The chat as one text; `cue`: with what begins the answer. Raises BadPrompt."""
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                messages=list(messages), tools=list(tools) or None, add_generation_prompt=cue
            ):
                size += len(part)
                if size > _LONGEST:
                    raise BadPrompt(f"the chat template makes more than {_LONGEST} characters of these messages")
                parts.append(part)
        except BadPrompt:
            raise
        except Exception as err:  # a template may fail in any way that Python can
            raise BadPrompt(f"the model's chat template refuses these messages: {_short(err)}") from None
        return "".join(parts)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise BadPrompt(f"the model's chat template refuses these messages: {message}")


def _short(err: Exception) -> str:
    return (str(err).splitlines() or [type(err).__name__])[0][:200]
