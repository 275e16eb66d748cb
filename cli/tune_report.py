"""What `kvtape tune` says: the best point, how to run it, and every trial on the way to it."""

from __future__ import annotations

import shlex
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtape.cli.output import Section
    from kvtape.sim.costs.model import CostTable
    from kvtape.sim.whatif.rows import Draws
    from kvtape.sim.whatif.search import Found, Scored, Wish
    from kvtape.sim.whatif.space import Space

__all__ = ["tune_body", "tune_sections"]


def tune_body(
    found: Found, wish: Wish, space: Space, simulate: Sequence[str], costs: CostTable, source: str, draws: Draws
) -> dict[str, Any]:
    """What `--json` prints. `simulate`: the command that simulates this log, without a policy and what goes with it.

    `rows`: one a point, as in a what-if, in the order in which they were first tried; `trials`: a place in `rows` each.
    """
    from kvtape.cli.output import report_digest
    from kvtape.sim.whatif.rows import draw_rules

    costs_digest = report_digest(costs.to_json())
    searched = {
        text: {name: [str(v) for v in values] for name, values in space.dimensions(i).items()}
        for i, text in enumerate(space.policies)
    }
    config = {
        "space": searched,
        "machine": space.base.as_dict(),
        "minimize" if wish.goal.better == "less" else "maximize": wish.goal.name,
        "where": [str(condition) for condition in wish.conditions],
        "seed": draws.seed,
        "seeds": draws.count,
    }
    rules = {k: v for k, v in space.base.rules().items() if k != "slots"} | draw_rules(space.base, draws)
    return config | {
        "feasible": found.best is not None,
        "best": None if found.best is None else _row(found.best, wish),
        "nearest": None if found.nearest is None else _row(found.nearest, wish),
        "commands": None if found.best is None else _commands(found.best, simulate, space.scripts[0].row.backend),
        "rows": [_row(scored, wish) for scored in found.points],
        "trials": list(found.trials),
        "choices": space.size,
        "method": found.method,
        "rules": rules,
        "assumed": list(found.assumed),
        "hypothetical": costs.origin.hypothetical,
        "source_digest": source,
        "costs_digest": costs_digest,
        "config_digest": report_digest(config | {"costs": costs_digest, "trials": len(found.trials)}),
    }


def _row(scored: Scored, wish: Wish) -> dict[str, Any]:
    if scored.row["error"] is not None:
        return scored.row | {"feasible": False, "missed": []}
    missed = [str(c) for c, by in zip(wish.conditions, scored.misses, strict=True) if by]
    return scored.row | {"feasible": scored.feasible, "missed": missed}


def _commands(scored: Scored, simulate: Sequence[str], backend: str) -> dict[str, str]:
    """How to simulate the point, and how to record under its policy on the log's engine."""
    from kvtape.planner.specs import parse_policy

    s = scored.point.settings
    chosen = ["--policy", scored.point.policy] + ([] if s.n_ctx is None else ["--n-ctx", str(s.n_ctx)])
    cold = [] if s.cold_tokens is None else ["--cold-tokens", str(s.cold_tokens)]
    slots = [] if s.slots is None else ["--slots", str(s.slots)]
    record = ["kvtape", "record", "--model", "M.gguf", "--chat", "F.jsonl", "--log", "NEW.duckdb"]
    if backend in ("llama", "openvino"):
        scored_by = ":scores=on" if parse_policy(scored.point.policy).score_request is not None else ""
        record += ["--backend", backend + scored_by]
    return {
        "simulate": shlex.join([*simulate, *chosen, *cold, *slots]),
        "record": shlex.join([*record, *chosen, *cold]),
    }


def tune_sections(body: dict[str, Any]) -> list[Section]:
    """The verdict, the best or nearest point with its commands, the trials, rules and what had to be assumed."""
    from kvtape.cli.output import Section
    from kvtape.cli.simulation import rule_sections

    goal = body.get("minimize") or body["maximize"]
    shown = body["best"] or body["nearest"]
    wanted = " and ".join(map(_written, body["where"])) or "no condition"
    verdict = (
        f"best of {len(body['rows'])} points: {shown['policy']} at {shown['budget']} tokens"
        if body["feasible"]
        else f"NOTHING that was tried meets {wanted}; nearest of {len(body['rows'])} points, misses "
        f"{', '.join(map(_written, shown['missed']))}: {shown['policy']} at {shown['budget']} tokens"
    )
    names = dict.fromkeys([goal, *(_name(text) for text in body["where"])])
    facts = [(_column(name), _value(shown, name)) for name in names]
    facts += [(name, shown[name]) for name in ("slots", "cold_tokens") if shown[name] is not None]
    sections = [Section(verdict, ("what", "value"), facts)]
    if body["commands"] is not None:
        sections.append(Section("use it", (), [(command,) for command in body["commands"].values()]))
    sections.append(_trials(body, list(names)))
    searched = [(f"{len(body['trials'])} trials of {body['choices']} choices", body["method"])]
    return sections + rule_sections([*searched, *body["rules"].items()], body["assumed"])


def _trials(body: dict[str, Any], names: list[str]) -> Section:
    from kvtape.cli.output import Section

    first: dict[int, int] = {}
    rows = []
    for number, place in enumerate(body["trials"], 1):
        row = body["rows"][place]
        again = first.setdefault(place, number)
        said = (
            f"as trial {again}" if again != number else _short(row["error"]) or ", ".join(map(_written, row["missed"]))
        )
        figures = [_value(row, name) for name in names]
        rows.append((number, row["policy"], row["budget"], row["slots"], row["cold_tokens"], *figures, said or "yes"))
    columns = ("trial", "policy", "budget", "slots", "cold tokens", *map(_column, names), "meets all")
    return Section("trials", columns, rows)


def _name(condition: str) -> str:
    return condition.replace(">=", "<=").partition("<=")[0]


def _column(name: str) -> str:
    """A figure's name for people: times in ms, as in the table of `kvtape simulate`."""
    return name.removesuffix("_ns") + ", ms" if name.endswith("_ns") else name


def _value(row: Mapping[str, Any], name: str) -> Any:
    value = row.get(name)
    return value / 1e6 if name.endswith("_ns") and value is not None else value


def _written(condition: str) -> str:
    """A condition as `--where` takes it, a time in ms."""
    name = _name(condition)
    if not name.endswith("_ns"):
        return condition
    sign, bound = condition[len(name) :][:2], Decimal(condition[len(name) + 2 :])
    return f"{name.removesuffix('_ns')}{sign}{bound.scaleb(-6).normalize():f}ms"


def _short(error: str | None) -> str:
    """What fits a table; the whole of it is in the JSON."""
    return "" if error is None else f"cannot be: {error if len(error) <= 60 else error[:59] + '…'}"
