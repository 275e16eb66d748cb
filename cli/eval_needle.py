"""`kvtape eval --task needle`: recall of a planted fact, and the layers that find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtape.backends.errors import UsageError
from kvtape.cli.evaluation import Asked, check_common, envelope, opened_targets, opened_world
from kvtape.cli.output import Section, emit, note
from kvtape.cli.progress import progress
from kvtape.eval.candidates import Candidate, candidates_of
from kvtape.eval.intervals import WILSON
from kvtape.eval.layers import LayerRun, best_runs, choose_layers, least_run, probe_prompts
from kvtape.eval.needle import NeedleTask, NeedleTrial, prepare, prompts_of, run_needle
from kvtape.eval.needle_report import needle_rows
from kvtape.eval.needles import FORMATS
from kvtape.eval.places import REGIONS, Regions, regions_of
from kvtape.eval.ranges import parse_range
from kvtape.eval.targets import Target, World, check_target
from kvtape.planner.grammar import choose_name

__all__ = ["run_layers", "run_needles"]

DEFAULT_TOKENS = 1000
_CHOSEN = "layers=chosen"
_SHOWN_RUNS = 8
_RULES = {
    "interval": WILSON,
    "order": "prefill, score, evict, then the question",
    "budget": "tokens kept of the context; question and answer come on top",
    "correct": "the greedy answer begins with the expected word",
}


def run_needles(asked: Asked) -> int:
    """Exit 0. Raises UsageError and SpecError for what cannot be run, before a log exists."""
    check_common(asked)
    seeds, layer_seeds = _seed_ranges(asked)
    # Whatever the layers will be: budgets and spans do not depend on them.
    candidates = candidates_of([_with_layers(p, "0") for p in asked.policies], asked.budgets)
    task = _task(asked, seeds, _regions(candidates))
    config = asked.config(
        policies=list(asked.policies),
        budgets=list(asked.budgets),
        seeds=asked.seeds,
        layer_seeds=asked.layer_seeds,
        format=task.format_name,
        needle_at=list(task.where),
        tokens=task.n_tokens,
        n_ctx=task.n_ctx,
    )
    with opened_targets(asked) as targets:
        config["model"] = targets[0].engine.facts.fingerprint
        prompts = prepare(task, targets, candidates)
        if layer_seeds is not None:
            check_target(targets[0], [], task.n_tokens, scores=True)
        with opened_world(asked, config, targets) as world, progress("evaluating") as shown:
            chosen = None
            if layer_seeds is not None:
                calibration = _task(asked, layer_seeds, task.regions)
                chosen = _choose(calibration, targets[0], world, candidates[0].policy.block)[0]
                candidates = candidates_of([_with_layers(p, chosen.text) for p in asked.policies], asked.budgets)
            trials = run_needle(task, targets, prompts, candidates, world, shown.update)
        rows = needle_rows(trials)
        body = envelope(config, targets)
    body |= {
        "rules": _RULES | {"regions": task.regions.text()},
        "layers": None if chosen is None else chosen.text,
        "rows": rows,
    }
    if asked.timings:
        _note_timings(trials)
    emit("eval", body, [_table(rows)], as_json=asked.as_json)
    return 0


def run_layers(asked: Asked) -> int:
    """`--choose-layers`: print the best runs of layers on these seeds, and test nothing."""
    check_common(asked)
    if asked.layer_seeds is not None:
        raise UsageError("--choose-layers chooses on --seeds; leave --layer-seeds out")
    if len(asked.backends) != 1:
        raise UsageError("--choose-layers asks one backend; give one --backend")
    candidates = candidates_of(asked.policies, asked.budgets)
    task = _task(asked, parse_range("--seeds", asked.seeds), _regions(candidates))
    config = asked.config(
        seeds=asked.seeds, format=task.format_name, needle_at=list(task.where), tokens=task.n_tokens, choose_layers=True
    )
    with opened_targets(asked) as targets:
        config["model"] = targets[0].engine.facts.fingerprint
        check_target(targets[0], [], task.n_tokens, scores=True)
        with opened_world(asked, config, targets) as world:
            runs = _choose(task, targets[0], world, candidates[0].policy.block)
        body = envelope(config, targets)
    n_layers = 1 + max(run.last for run in runs)
    rows: list[dict[str, Any]] = [
        {
            "layers": run.text,
            "margin": round(run.margin, 6),
            "first_share": round(run.first_share, 6),
            "n": len(task.seeds) * len(task.where),
        }
        for run in best_runs(runs, _SHOWN_RUNS)
    ]
    body |= {
        "layers": runs[0].text,
        "n_layers": n_layers,
        "rules": {
            "margin": "log2 of attention to the fact's worst block over that to the best other, mean over prompts",
            "runs": f"neighbouring layers, at least {least_run(n_layers)} of {n_layers}; the best, and all together",
            "regions": task.regions.text(),
        },
        "rows": rows,
    }
    columns = ("layers", "margin, bits", "fact first", "n")
    table = [(r["layers"], round(r["margin"], 3), round(r["first_share"], 3), r["n"]) for r in rows]
    emit("eval", body, [Section(f"layers={runs[0].text}", columns, table)], as_json=asked.as_json)
    return 0


def _seed_ranges(asked: Asked) -> tuple[range, range | None]:
    seeds = parse_range("--seeds", asked.seeds)
    wants = any(_CHOSEN in p for p in asked.policies)
    if asked.layer_seeds is None:
        if wants:
            raise UsageError("layers=chosen: say on which seeds with --layer-seeds A:B")
        return seeds, None
    if not wants:
        raise UsageError("--layer-seeds: no policy says layers=chosen")
    layer_seeds = parse_range("--layer-seeds", asked.layer_seeds)
    if max(seeds.start, layer_seeds.start) < min(seeds.stop, layer_seeds.stop):
        raise UsageError(
            f"--layer-seeds {asked.layer_seeds} and --seeds {asked.seeds} overlap; layers are never chosen on what is "
            "tested: take two ranges apart"
        )
    return seeds, layer_seeds


def _with_layers(policy: str, layers: str) -> str:
    return policy.replace(_CHOSEN, f"layers={layers}")


def _task(asked: Asked, seeds: range, regions: Regions) -> NeedleTask:
    format_name, where = asked.format_name or "city", asked.where or ("middle",)
    choose_name("format", format_name, FORMATS)
    for region in where:
        choose_name("region", region, REGIONS)
    return NeedleTask(
        format_name=format_name,
        seeds=tuple(seeds),
        where=tuple(dict.fromkeys(where)),
        regions=regions,
        n_tokens=asked.tokens or DEFAULT_TOKENS,
        n_ctx=asked.n_ctx,
    )


def _regions(candidates: Sequence[Candidate]) -> Regions:
    """By the spans of `stream`; where it is not asked, by what it would keep at the same sink and budget."""
    spans = [(c.policy.sink, c.policy.recent) for c in candidates if c.policy.name == "stream"]
    return regions_of(spans or [(c.policy.sink, c.budget - c.policy.sink) for c in candidates if c.budget] or [(0, 1)])


def _choose(task: NeedleTask, target: Target, world: World, block: int) -> list[LayerRun]:
    with progress("choosing layers") as shown:
        prompts = prompts_of(task, target)
        probes = probe_prompts(prompts, target, world, regions=task.regions, block=block, progress=shown.update)
        return choose_layers(list(probes))


def _table(rows: Sequence[dict[str, Any]]) -> Section:
    keys = ("backend", "region", "policy", "budget", "recall", "recall_low", "recall_high", "n", "kept", "needle_kept")
    columns = ("backend", "region", "policy", "budget", "recall", "low", "high", "n", "kept", "fact kept", "scored")
    said = {True: "yes", False: "no: as stream", None: "-"}
    cells = [
        (*(round(row[k], 3) if isinstance(row[k], float) else row[k] for k in keys), said[row["scored"]])
        for row in rows
    ]
    return Section(f"recall; {WILSON}", columns, cells)


def _note_timings(trials: Sequence[NeedleTrial]) -> None:
    took: dict[str, list[int]] = {}
    for t in trials:
        took.setdefault(f"{t.backend}\t{t.region}\t{t.candidate.label}", []).append(t.elapsed_ns)
    for what, each in took.items():
        note(f"{what}\t{sum(each) / len(each) / 1e9:.3f} s a trial")
