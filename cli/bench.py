"""`kvtape bench`: KV engines beside `standard`, in what they predict, what they hold and how fast they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AnyModelPath, AsJson

if TYPE_CHECKING:
    from kvtape.backends.protocol import Engine
    from kvtape.backends.reference.engines.registry import EngineChoice
    from kvtape.eval.engine_cases import EngineCase

__all__ = ["bench"]

_PROMPTS, _PROMPT_TOKENS = 20, 96


@dataclass(frozen=True, slots=True)
class _Asked:
    prompts: tuple[str, ...]
    text: str | None
    n: int
    prompt_tokens: int
    steps: int
    force: str | None


def bench(
    engine: Annotated[
        list[str] | None, typer.Option("--engine", metavar="SPEC", help="An engine to measure; repeat for more.")
    ] = None,
    model: AnyModelPath = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="In place of the text; repeat for more.")
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", metavar="F", help="Cut into prompts; default: the shipped essay.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", metavar="N", min=1, help="Stretches of the text; default 20.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", metavar="N", min=1, help="Tokens of each; default 96.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Decode steps behind each prompt.")] = 64,
    force: Annotated[
        str | None,
        typer.Option(
            "--force",
            metavar="text|greedy",
            help="Whose tokens stand behind a prompt: the text's, or standard's own first choices (as with --prompt).",
        ),
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", metavar="N", min=1, help="Most likely tokens to compare.")] = 5,
    packed: Annotated[
        bool, typer.Option("--packed", help="Resident path: compute from the quantised weights; slower, far smaller.")
    ] = False,
    list_engines: Annotated[bool, typer.Option("--list", help="List the engines and what they promise.")] = False,
    as_json: AsJson = False,
) -> int:
    """Measure KV engines beside standard, on the NumPy reference.

    Every engine is given the same tokens as standard, step by step: KL, likelihood, first choices, bits, and whether
    its promise was kept (if not: exit code 1). Times are of a machine that is shared with whatever else runs. On the
    demo model an engine takes some minutes; --prompts 2 for a glance. KVTAPE_KV_ENGINE is not read.

    \b
    Examples:
      kvtape bench --engine standard --engine no-cache --json
      kvtape bench --engine tq4 --engine tq3 --prompts 4
    """
    from kvtape.backends.errors import UsageError
    from kvtape.backends.reference.engines.registry import engine_names, parse_engine
    from kvtape.cli.engine_list import engine_bodies, engine_section
    from kvtape.cli.output import emit

    if list_engines:
        emit("bench", {"engines": engine_bodies()}, [engine_section()], as_json=as_json)
        return 0
    if not engine:
        raise UsageError(f"name engines with --engine ({', '.join(engine_names())}); --list says what they are")
    choices = [parse_engine(spec) for spec in engine]
    asked = _Asked(tuple(prompt or ()), text, prompts or _PROMPTS, prompt_tokens or _PROMPT_TOKENS, steps, force)
    _check(asked, cut=prompts is not None or prompt_tokens is not None)
    return _run(choices, asked, model, top_k=top_k, packed=packed, as_json=as_json)


def _check(asked: _Asked, *, cut: bool) -> None:
    """Before a model is loaded. Raises UsageError for what would have no effect, and a --force that is none."""
    from kvtape.backends.errors import UsageError

    if asked.force not in (None, "text", "greedy"):
        raise UsageError(f"--force {asked.force}: unknown; allowed: greedy, text")
    if asked.prompts and (asked.text is not None or cut or asked.force == "text"):
        raise UsageError(
            "--prompt gives whole prompts: --text, --prompts, --prompt-tokens and --force text do not go with it"
        )
    if any(not prompt.strip() for prompt in asked.prompts):
        raise UsageError("--prompt: the text is empty; give at least one word")


def _run(
    choices: Sequence[EngineChoice], asked: _Asked, model: Path | None, *, top_k: int, packed: bool, as_json: bool
) -> int:
    from kvtape.backends.clock import MonotonicClock
    from kvtape.backends.reference.model.weights import Weights
    from kvtape.cli.bench_tables import bench_sections
    from kvtape.cli.engine_text import vocabulary
    from kvtape.cli.models import demo_model
    from kvtape.cli.output import emit, report_digest
    from kvtape.cli.progress import progress
    from kvtape.eval.engine_accuracy import EngineComparison
    from kvtape.eval.engine_report import accuracy_row, timeless

    path = model if model is not None else demo_model()
    weights = Weights(path, packed=packed)
    with vocabulary(path) as words:
        cases = _cases(words, asked)
        fingerprint = words.facts.fingerprint
    comparison = EngineComparison(weights, choices, steps=asked.steps, top_k=top_k, clock=MonotonicClock())
    with progress("measuring") as shown:
        for number, case in enumerate(cases):
            shown.update(number, len(cases), case.name)
            comparison.add(case)
    report = weights.report()
    rows = [accuracy_row(track, report) for track in comparison.tracks]
    body: dict[str, Any] = {
        "model": fingerprint,
        "prompts": len(cases),
        "prompt_tokens": sum(len(case.prompt) for case in cases),
        "steps": asked.steps,
        "forced_by": "standard" if cases[0].continuation is None else "text",
        "top_k": top_k,
        "packed_matrices": report.packed,
        "matrices": report.matrices,
    }
    digest = report_digest({**body, "rows": [timeless(row) for row in rows]})
    emit("bench", {**body, "rows": rows}, bench_sections(rows, body), as_json=as_json, digest=digest)
    return int(any(row["kept"] is False or not row["served"] for row in rows))


def _cases(words: Engine, asked: _Asked) -> list[EngineCase]:
    from dataclasses import replace

    from kvtape.cli.engine_text import check_length, essay
    from kvtape.cli.prompts import read_text
    from kvtape.eval.engine_cases import EngineCase, text_cases

    if asked.prompts:
        cases = [EngineCase(f"prompt:{i}", tuple(words.tokenize(text))) for i, text in enumerate(asked.prompts)]
    else:
        name, text = ("essay", essay()) if asked.text is None else (asked.text, read_text(asked.text))
        cases = text_cases(name, words.tokenize(text), n=asked.n, prompt_tokens=asked.prompt_tokens, steps=asked.steps)
        if asked.force == "greedy":
            cases = [replace(case, continuation=None) for case in cases]
    for case in cases:
        check_length(words, len(case.prompt), asked.steps + 1)
    return cases
