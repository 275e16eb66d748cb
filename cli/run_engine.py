"""`kvtape run`: a prompt through one KV engine of the reference."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AnyModelPath, AsJson

if TYPE_CHECKING:
    from kvtape.backends.protocol import Clock
    from kvtape.backends.reference.engines.harness import Harness
    from kvtape.cli.engine_choice import Chosen

__all__ = ["run_engine"]


@dataclass(slots=True)
class _Said:
    """`stopped`: `steps`, or `end` where the model ended its text; that token is not among `tokens`."""

    tokens: list[int] = field(default_factory=list)
    stopped: str = "steps"
    prefill_ns: int = 0
    step_ns: int = 0
    n_steps: int = 0


def run_engine(
    model: AnyModelPath = None,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="What the model goes on from.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option("--prompt-file", metavar="F", help="The same from a file; - for stdin.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Tokens to generate at most.")] = 64,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="SPEC", help="What keeps the cache; default: KVTAPE_KV_ENGINE, or standard."),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            "--kv-cache", metavar="KIND", help="Older names: standard, markov-bounded (standard:window=N) or none."
        ),
    ] = None,
    context_window: Annotated[
        int | None,
        typer.Option("--context-window", metavar="N", min=1, help="With --kv-cache markov-bounded: rows attended to."),
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="Resident path: compute from the quantised weights; slower, far smaller.")
    ] = False,
    ffn: Annotated[
        str | None, typer.Option("--ffn", metavar="URL", help="Feed-forward layers at a kvtape ffn-server.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Generate from a prompt on one KV engine, on the NumPy reference; the most likely token each time.

    Which engine: --engine, else --kv-cache, else the variable KVTAPE_KV_ENGINE, else standard. kvtape bench --help has
    them all, and what each promises.

    \b
    Examples:
      kvtape run --prompt "Once upon a time" --steps 40
      kvtape run --prompt-file book.txt --engine markov-rs:window=256 --json
    """
    from kvtape.backends.clock import MonotonicClock
    from kvtape.backends.reference.engines.harness import Harness
    from kvtape.backends.reference.model.weights import Weights
    from kvtape.backends.reference.remote.ffn_remote import RemoteFfn
    from kvtape.cli.engine_choice import chosen_engine
    from kvtape.cli.engine_text import check_length, one_prompt, vocabulary
    from kvtape.cli.models import demo_model
    from kvtape.cli.output import note
    from kvtape.eval.engine_runs import warm_up

    text = one_prompt(prompt, prompt_file)
    chosen = chosen_engine(engine, kv_cache, context_window, os.environ)
    if chosen.warning is not None:
        note(f"kvtape: {chosen.warning}")
    path = model if model is not None else demo_model()
    weights = Weights(path, packed=packed)
    with vocabulary(path) as words:
        tokens = words.tokenize(text)
        check_length(words, len(tokens), steps)
        if ffn is None and not packed:
            warm_up(weights)
        harness = Harness(chosen.choice, weights, None if ffn is None else RemoteFfn(ffn, weights))
        said = _generate(harness, tokens, steps, words.facts.end_tokens, MonotonicClock())
        _report(chosen, harness, len(tokens), said, words.detokenize(said.tokens), path, as_json=as_json)
    return 0


def _generate(harness: Harness, prompt: Sequence[int], n: int, ends: frozenset[int], clock: Clock) -> _Said:
    from kvtape.cli.progress import progress

    said = _Said()
    with progress("generating") as shown:
        for token in _stream(harness, prompt, said, clock):
            if token in ends:
                said.stopped = "end"
                break
            said.tokens.append(token)
            shown.update(len(said.tokens), n)
            if len(said.tokens) == n:
                break
    return said


def _stream(harness: Harness, prompt: Sequence[int], said: _Said, clock: Clock) -> Iterator[int]:
    """The first of the largest logits, for ever; times go to `said`."""
    began = clock.now_ns()
    logits = harness.begin(prompt)
    said.prefill_ns = clock.now_ns() - began
    while True:
        token = int(logits.argmax())
        yield token
        began = clock.now_ns()
        logits = harness.step(token)
        said.step_ns += clock.now_ns() - began
        said.n_steps += 1


def _report(
    chosen: Chosen, harness: Harness, n_prompt: int, said: _Said, text: str, path: Path, *, as_json: bool
) -> None:
    from kvtape.backends.reference.engines.engine import KvEngine
    from kvtape.cli.output import Section, emit, report_digest
    from kvtape.eval.engine_report import memory_body, path_name, rate

    engine, report = harness.engine, harness.weights.report()
    assert isinstance(engine, KvEngine)
    times = {
        "prefill_tokens_s": rate(n_prompt, said.prefill_ns),
        "decode_tokens_s": rate(said.n_steps, said.step_ns),
    }
    body: dict[str, Any] = {
        "model": path.name,
        "engine": engine.info.spec,
        "engine_source": chosen.source,
        "warnings": [] if chosen.warning is None else [chosen.warning],
        "contract": str(engine.info.contract),
        "quadratic": engine.info.quadratic,
        "experimental": engine.info.experimental,
        "path": path_name(report),
        "tiles_unpacked": report.tiles_unpacked,
        "router": harness.router.name,
        "prompt_tokens": n_prompt,
        "completion_tokens": len(said.tokens),
        "decode_steps": said.n_steps,
        "stopped": said.stopped,
        "tokens": said.tokens,
        "text": text,
        "window_tokens": engine.window_tokens,
        "memory": memory_body(engine.memory()),
        "stages": dict(engine.stage_summary()),
    }
    shown = ("engine", "engine_source", "contract", "path", "prompt_tokens", "completion_tokens", "stopped")
    rows: list[tuple[str, Any]] = [(key, body[key]) for key in shown]
    rows += [(f"{k.kind} bytes", k.occupied) for k in engine.memory().kinds] + list(times.items())
    sections = [
        Section(None, (), [(line,) for line in text.split("\n")]),
        Section(f"run on {path.name}", ("what", "value"), rows),
    ]
    emit("run", body | times, sections, as_json=as_json, digest=report_digest(body))
