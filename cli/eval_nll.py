"""`kvtape eval --task nll`: the likelihood of a long text that streams through a small context."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from kvtape.cli.evaluation import Asked, check_common, envelope, opened_targets, opened_world
from kvtape.cli.output import Section, emit, note
from kvtape.cli.progress import progress
from kvtape.cli.prompts import read_text
from kvtape.eval.candidates import candidates_of
from kvtape.eval.intervals import BATCH_MEANS
from kvtape.eval.nll import NllTask, check_task, run_nll
from kvtape.eval.nll_report import BATCH, nll_rows
from kvtape.eval.ranges import parse_range
from kvtape.eval.targets import Target
from kvtape.eval.texts import long_text, tokens_of

__all__ = ["run_nlls"]

DEFAULT_N_CTX = 256
_TIMES_N_CTX = 8
_STRETCH = 1000


def run_nlls(asked: Asked) -> int:
    """Exit 0. Raises UsageError and SpecError for what cannot be run, before a log exists."""
    check_common(asked)
    seed = None if asked.text is not None else parse_range("--seeds", asked.seeds).start
    candidates = [c.settled(seed or 0) for c in candidates_of(asked.policies, asked.budgets)]
    text = None if asked.text is None else read_text(asked.text)
    config = asked.config(
        policies=list(asked.policies),
        budgets=list(asked.budgets),
        seed=seed,
        text=None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        tokens=asked.tokens,
        n_ctx=asked.n_ctx or DEFAULT_N_CTX,
    )
    rows: list[dict[str, Any]] = []
    with opened_targets(asked) as targets:
        config["model"] = targets[0].engine.facts.fingerprint
        tasks = [_task(asked, target, text, seed) for target in targets]
        for task, target in zip(tasks, targets, strict=True):
            check_task(task, target, candidates)
        with opened_world(asked, config, targets) as world, progress("evaluating") as shown:
            for number, (task, target) in enumerate(zip(tasks, targets, strict=True)):
                began = world.clock.now_ns()
                tracks = run_nll(task, target, number, candidates, world, shown.update)
                rows += nll_rows(tracks, len(task.tokens), task.stretch)
                if asked.timings:
                    note(f"{target.spec}\t{(world.clock.now_ns() - began) / 1e9:.1f} s")
        body = envelope(config, targets)
    rules = {
        "interval": BATCH_MEANS.format(n=BATCH),
        "nll": "mean negative log likelihood, nats a token, teacher-forced one token at a time",
        "excess": "nll less that of dense attention, token by token",
        "kl": "KL(dense || policy), nats a token, at the same token after the same text",
        "resident_most": "the most tokens resident after any event of the session",
    }
    emit("eval", body | {"rules": rules, "rows": rows}, [_table(rows, rules["interval"])], as_json=asked.as_json)
    return 0


def _task(asked: Asked, target: Target, text: str | None, seed: int | None) -> NllTask:
    n_ctx = asked.n_ctx or DEFAULT_N_CTX
    if text is None:
        tokens = long_text(target.engine.tokenize, seed or 0, asked.tokens or _TIMES_N_CTX * n_ctx)
    else:
        tokens = tokens_of(target.engine.tokenize, text, asked.tokens)
    return NllTask(tokens, n_ctx, _STRETCH, seed)


def _table(rows: Sequence[dict[str, Any]], interval: str) -> Section:
    figures = ("nll", "excess", "excess_low", "excess_high", "kl", "perplexity", "resident_most")
    keys = ("backend", "policy", "budget", "part", *figures)
    columns = (
        "backend",
        "policy",
        "budget",
        "tokens",
        "nll",
        "over dense",
        "low",
        "high",
        "kl",
        "perplexity",
        "resident",
    )
    cells = [
        (*(round(row[k], 3) if isinstance(row[k], float) else row[k] for k in keys), row["absent"] or "-")
        for row in rows
    ]
    return Section(f"likelihood; {interval}", (*columns, "why not"), cells)
