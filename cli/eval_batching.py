"""`kvtape eval --task batching`: native cache eviction of continuous batching beside kvtape's policies."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvtape.backends.batching.config import BLOCK, COMPARATOR, Eviction, read_eviction
from kvtape.backends.batching.files import read_batching_shape
from kvtape.backends.errors import UsageError
from kvtape.backends.proofs.machine import machine_class
from kvtape.cli.batching_tables import curve_table, option_table, versus_table
from kvtape.cli.evaluation import Asked, check_common, envelope, opened_targets, opened_world
from kvtape.cli.models import demo_model
from kvtape.cli.output import emit, note
from kvtape.cli.progress import progress
from kvtape.cli.prompts import read_text
from kvtape.eval.batching.cases import option_cases
from kvtape.eval.batching.compare import check_versus, run_versus
from kvtape.eval.batching.option_report import option_rows, option_verdicts
from kvtape.eval.batching.policies import DEFAULT_POLICIES, policies_beside
from kvtape.eval.batching.prompts import prompts_from_seeds, prompts_from_text
from kvtape.eval.batching.proofs import LIMIT_DIFFERENCE, LIMIT_EXCESS, prove
from kvtape.eval.batching.report import agreement, curve_rows, versus_rows
from kvtape.eval.batching.tracks import BatchingTask, Continued
from kvtape.eval.ranges import parse_range
from kvtape.eval.targets import Target
from kvtape.planner.grammar import choose_name

__all__ = ["run_batching"]

_DEFAULT_TOKENS = 512
_DEFAULT_NEW = 64
_DEFAULT_BLOCKS = 8
_PROOF_TOKENS = 16
_CONTINUED: dict[str, Continued] = {"text": "text", "greedy": "greedy"}


def run_batching(asked: Asked) -> int:
    """Exit 1 when both sides, keeping everything, do not say the same. Raises UsageError and SpecError for what cannot
    be run, before a log exists."""
    check_common(asked)
    if len(asked.backends) > 1:
        raise UsageError("--backend: --task batching compares with one backend at a time; give one")
    _CONTINUED[choose_name("--continue", asked.continued, _CONTINUED)]
    seeds = parse_range("--seeds", asked.seeds)
    model = asked.model if asked.model is not None else demo_model()
    read_batching_shape(model)
    text = None if asked.text is None else read_text(asked.text)
    config = asked.config(
        seeds=[seeds.start, seeds.stop],
        text=None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        tokens=asked.tokens or _DEFAULT_TOKENS,
        new_tokens=asked.new_tokens or _DEFAULT_NEW,
        continued=asked.continued,
    )
    run = _prove if asked.prove_options else _compare
    return run(asked, model, seeds, text, config)


def _compare(asked: Asked, model: Path, seeds: range, text: str | None, config: dict[str, Any]) -> int:
    evictions = _evictions(asked)
    config |= {"comparators": [e.label for e in evictions], "policies": list(asked.policies or DEFAULT_POLICIES)}
    candidates = [policies_beside(e, asked.policies or DEFAULT_POLICIES, seeds.start) for e in evictions]
    rows: list[dict[str, Any]] = []
    curve: list[dict[str, Any]] = []
    agreed: dict[str, Any] = {}
    with opened_targets(asked) as targets:
        target = targets[0]
        config["model"] = target.engine.facts.fingerprint
        task = _task(asked, target, seeds, text)
        for eviction, of in zip(evictions, candidates, strict=True):
            check_versus(task, model, [eviction], target, of)
        with opened_world(asked, config, targets) as world, progress("comparing") as shown:
            for number, (eviction, of) in enumerate(zip(evictions, candidates, strict=True)):
                began = world.clock.now_ns()
                found = run_versus(task, model, eviction, target, of, world, number, shown.update)
                rows += versus_rows(eviction, found)
                curve += curve_rows(eviction, found)
                agreed[eviction.label] = agreement(found)
                if asked.timings:
                    note(f"{eviction.label}\t{(world.clock.now_ns() - began) / 1e9:.1f} s")
        body = envelope(config, targets)
    same = all(a["same_model"] for a in agreed.values())
    body |= {"rules": _RULES, "comparator": _comparator(), "agreement": agreed, "rows": rows, "curve": curve}
    emit("eval", body, [versus_table(rows), curve_table(curve)], as_json=asked.as_json)
    if not same:
        note(
            "kvtape: both sides say different things of the same tokens when they keep everything; nothing is compared"
        )
    return 0 if same else 1


def _prove(asked: Asked, model: Path, seeds: range, text: str | None, config: dict[str, Any]) -> int:
    """A row for each option. What an option does wrong is a result, not a failure: exit 0."""
    if asked.policies or asked.comparators or asked.log is not None:
        raise UsageError("--prove-options takes no --policy, --comparator or --log: it runs continuous batching alone")
    budget = BLOCK * (asked.budget_blocks[0] if asked.budget_blocks else _DEFAULT_BLOCKS)
    n_new = asked.new_tokens or _PROOF_TOKENS
    config |= {"new_tokens": n_new, "budget": budget, "prove_options": True}
    with opened_targets(asked) as targets:
        config["model"] = targets[0].engine.facts.fingerprint
        prompt = _task(asked, targets[0], range(seeds.start, seeds.start + 1), text, n_new).prompts[0]
        body = envelope(config, targets)
    # Half a prompt at most: an option must also be right where a prompt comes in pieces.
    chunk = min(asked.chunk, len(prompt.tokens) // (2 * BLOCK) * BLOCK)
    cases = option_cases(len(prompt.tokens), n_new, budget=budget, chunk=chunk, threads=asked.threads)
    with progress("proving") as shown:
        proofs = prove(model, prompt, n_new, cases, asked.threads, shown.update)
    rows = option_rows(proofs)
    body |= {"rules": _PROOF_RULES, "comparator": _comparator(), "options": option_verdicts(proofs), "rows": rows}
    emit("eval", body, [option_table(rows)], as_json=asked.as_json)
    return 0


def _comparator() -> dict[str, str]:
    """What the rows speak of beside the model: results depend on the version and the class of machine."""
    return {"name": COMPARATOR, "version": f"openvino-genai {version('openvino-genai')}", "machine": machine_class()}


def _evictions(asked: Asked) -> list[Eviction]:
    budgets = [BLOCK * n for n in asked.budget_blocks or (_DEFAULT_BLOCKS,)]
    found = {
        eviction.label: eviction
        for text in asked.comparators or (COMPARATOR,)
        for eviction in (read_eviction(text, most) for most in budgets)
    }
    return list(found.values())


def _task(asked: Asked, target: Target, seeds: range, text: str | None, n_new: int | None = None) -> BatchingTask:
    tokens, new = asked.tokens or _DEFAULT_TOKENS, n_new or asked.new_tokens or _DEFAULT_NEW
    encode, decode = target.engine.tokenize, target.engine.detokenize
    if text is None:
        prompts = prompts_from_seeds(encode, decode, seeds, tokens, new)
    else:
        prompts = prompts_from_text(encode, decode, text, seeds, tokens, new)
    return BatchingTask(prompts, new, asked.chunk, asked.threads, _CONTINUED[asked.continued])


_RULES = {
    "interval": "Student, 95 %, over prompts",
    "nll": "mean negative log likelihood, nats a token, from each prompt's first evict on; the same tokens in every "
    "row of a comparator",
    "continued": "text: the prompt's own, forced through a grammar, cut into tokens by the comparator; greedy: what it "
    "finds likeliest, which flatters it",
    "over_dense": "nll less that of our dense session, prompt by prompt",
    "over_native": "nll less that of the comparator, prompt by prompt",
    "rows": "rows of each layer that a token was predicted from; the comparator's follow from its block count",
    "kept": "which tokens are resident: the comparator does not say, and evicts other blocks in each layer",
    "logits": "the comparator gives the log-probability of the token it took, nothing else",
}

_PROOF_RULES = {
    "exact": f"a setting that leaves nothing out: log-probabilities within {LIMIT_DIFFERENCE} nats of dense's, the "
    "same greedy tokens",
    "lossy": f"at most {LIMIT_EXCESS} nats a token over dense on the same tokens, and not wrong where the same "
    "computation leaves nothing out",
    "repeatable": "the same prompt, twice on one pipeline, has the same log-probabilities to the bit",
    "error": "the pipeline failed, or its process died",
}
