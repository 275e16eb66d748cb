"""Text in and out of the KV engines, by the model's own vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from kvtape.backends.errors import ContextOverflow, UsageError
from kvtape.backends.protocol import Engine
from kvtape.backends.registry import open_engine
from kvtape.cli.prompts import read_text

__all__ = ["check_length", "essay", "one_prompt", "vocabulary"]


@contextmanager
def vocabulary(model: Path) -> Iterator[Engine]:
    """Something that tokenises and detokenises; nothing is computed on it."""
    engine = open_engine("reference", model)
    try:
        yield engine
    finally:
        engine.close()


def essay() -> str:
    """The text that ships with kvtape."""
    return files("kvtape.cli").joinpath("text", "essay.txt").read_text(encoding="utf-8")


def one_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """Raises UsageError unless exactly one is given, InputRejected for an empty text."""
    if (prompt is None) == (prompt_file is None):
        raise UsageError("give one of --prompt and --prompt-file")
    if prompt_file is not None:
        return read_text(prompt_file)
    assert prompt is not None
    if not prompt.strip():
        raise UsageError("--prompt: the text is empty; give at least one word")
    return prompt


def check_length(engine: Engine, n_prompt: int, steps: int) -> None:
    """Raises ContextOverflow for more than the model was trained for."""
    trained = engine.facts.n_ctx_train
    if n_prompt + steps > trained:
        why = f"{n_prompt} of the prompt, --steps {steps}; the model was trained for no more, so shorten either"
        raise ContextOverflow(n_prompt + steps, trained, why)
