"""Speculation as one line of text: `lookup[:ngram=3,tokens=8]` or `draft:model=NAME[,tokens=4]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvtape.backends.protocol import Backend, Engine
from kvtape.backends.registry import open_engine
from kvtape.backends.speculation.artifacts import artifact_named
from kvtape.backends.speculation.draft_model import DraftModel
from kvtape.backends.speculation.drafter import Drafter
from kvtape.backends.speculation.lookup import PromptLookup
from kvtape.backends.speculation.vocabulary import check_same_vocabulary
from kvtape.planner.grammar import REQUIRED, Option, choose_name, parse_options, parse_spec

__all__ = ["OPTIONS", "SPECULATIONS", "OpenEngine", "Speculation", "parse_speculation"]

OpenEngine = Callable[[str, Path, Mapping[str, str]], Engine]
"""As `registry.open_engine`."""

_MOST: Final = 31
"""Tokens of a draft: a recorded run has 32, and the first of them is no draft."""

OPTIONS: Final = {
    "lookup": {"ngram": Option(int, 3, (1, 8)), "tokens": Option(int, 8, (1, _MOST))},
    "draft": {"model": Option(str, REQUIRED), "tokens": Option(int, 4, (1, _MOST))},
}
"""What each spec takes."""

SPECULATIONS: Final = tuple(OPTIONS)
"""The names of specs."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a session speculates by. `spec` is canonical; `open` makes a drafter for one session on a backend.

    `check` raises UsageError where it cannot draft for that backend's model; `open` also what loading a draft model
    raises.
    """

    spec: str
    open: Callable[[Backend], Drafter]
    check: Callable[[Backend], None] = lambda _: None


def parse_speculation(text: str, opener: OpenEngine = open_engine) -> Speculation:
    """Raises SpecError for a spec that is not understood, UsageError for a draft model that is not there or changed.

    `opener` loads draft models, on the engine of the session that they draft for.
    """
    spec = parse_spec(text)
    name = choose_name("speculation", spec.name, OPTIONS)
    values = parse_options(spec, OPTIONS[name])
    tokens = values["tokens"]
    assert isinstance(tokens, int)
    if name == "lookup":
        ngram = values["ngram"]
        assert isinstance(ngram, int)
        return Speculation(
            PromptLookup(ngram=ngram, tokens=tokens).spec, lambda _: PromptLookup(ngram=ngram, tokens=tokens)
        )
    model = str(values["model"])
    file = Path(artifact_named(model, "draft").file)

    def check(target: Backend) -> None:
        check_same_vocabulary(target.facts.path, file)

    def open_draft(target: Backend) -> Drafter:
        check(target)
        return _opened(target, opener(target.name, file, {}), model, tokens)

    return Speculation(f"draft:model={model},tokens={tokens}", open_draft, check)


def _opened(target: Backend, engine: Engine, name: str, tokens: int) -> Drafter:
    """A draft session with the target's context and threads, on rows of the engine's plainest type; owns the engine."""
    n_ctx = min(target.n_ctx, engine.facts.n_ctx_train)
    config = replace(
        target.config,
        n_ctx=n_ctx,
        kv_type_k="f32",
        kv_type_v="f32",
        flash_attention="off",
        cold_budget_tokens=0,
        cold_budget_bytes=0,
        options={},
    )
    try:
        return DraftModel(engine.open(config), name=name, tokens=tokens, engine=engine)
    except BaseException:
        engine.close()
        raise
