"""What `kvtape explain` prints: one body for JSON, and the tables that tell the same to people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtape.cli.output import Section
from kvtape.planner.ranges import RangeSet

if TYPE_CHECKING:
    from kvtape.planner.rows import RunRow, SessionRow
    from kvtape.sim.explain.alternatives import Alternative
    from kvtape.sim.explain.computed import Eviction
    from kvtape.sim.explain.decision import BlockFate, Decision
    from kvtape.sim.explain.explaining import Explained

__all__ = ["explained_body", "explained_sections"]

_MOST_ROWS = 60
"""Rows of the blocks' table; all of them are in the JSON."""

_BECAUSE = {
    "pinned": "pinned",
    "sink": "sink span",
    "recent": "recent span",
    "straddles": "straddles a border and is kept whole",
    "all": "neither sink, recent nor pinned",
    "chosen": "chosen by the policy's function",
    "no_need": "everything fits the budget",
    "no_way": "nothing can be evicted here",
}

_OUTCOMES = {
    "admitted": "came back from the cold store",
    "recomputed": "computed again in place",
    "restored": "came back with a snapshot",
    "prefilled_again": "the reuse of a prompt ended there: prefilled again",
    "forgotten": "a prompt had them, the session went on without",
    "off_the_tape": "the tape was cut before them: other tokens since",
    "never_asked": "not asked for again in this log",
}


def explained_body(
    found: Explained, run: RunRow, row: SessionRow, why_computed: dict[str, Any] | None
) -> dict[str, Any]:
    """The whole answer with stable keys; ranges are `[start, stop]` in tape positions, sizes in tokens."""
    event = found.event
    computed = None
    if found.computed is not None:
        c = found.computed
        computed = {
            "new": c.new.as_pairs(),
            "cut": c.cut.as_pairs(),
            "cut_seq": c.cut_seq,
            "cut_reason": c.cut_reason,
            "evicted": [_eviction(e) for e in c.evicted],
        }
    return {
        "run_id": run.run_id,
        "run_kind": run.kind,
        "session_id": row.session_id,
        "seq": event.seq,
        "op": str(event.op),
        "turn": event.turn,
        "reason": event.reason,
        "range": None if event.start is None or event.stop is None else [event.start, event.stop],
        "n_tokens": event.n_tokens,
        "plan_seq": found.plan_seq,
        "why_computed": why_computed,
        "computed": computed,
        "evicted_by": [_eviction(e) for e in found.evicted_by],
        "resident": None if found.moment is None else found.moment.state.resident.as_pairs(),
        "n_ctx": None if found.moment is None else found.moment.state.n_ctx,
        "decision": None if found.decision is None else _decision(found.decision),
        "alternatives": [_alternative(a) for a in found.alternatives],
        "hindsight": [
            {"what": o.what, "seq": o.seq, "ranges": o.ranges.as_pairs(), "tokens": o.ranges.n_tokens, "turns": o.turns}
            for o in found.outcomes
        ],
    }


def _eviction(e: Eviction) -> dict[str, Any]:
    return {"seq": e.seq, "plan_seq": e.plan_seq, "ranges": e.ranges.as_pairs(), "tokens": e.ranges.n_tokens}


def _decision(d: Decision) -> dict[str, Any]:
    plan = d.plan
    return {
        "policy": plan.policy,
        "trigger": plan.trigger,
        "limit_tokens": plan.limit_tokens,
        "incoming_tokens": plan.incoming_tokens,
        "budget_tokens": plan.budget_tokens,
        "total_tokens": plan.total_tokens,
        "hot_tokens": plan.hot_tokens,
        "protected_tokens": plan.protected_tokens,
        "need_tokens": d.need,
        "freed_tokens": d.freed,
        "overshoot_tokens": plan.overshoot_tokens,
        "over_budget": plan.over_budget,
        "diagnostics": json.loads(plan.diagnostics),
        "keep": json.loads(plan.keep),
        "evict": json.loads(plan.evict),
        "ranked_by": d.ranked_by,
        "threshold": d.threshold,
        "rederived": d.rederived.verdict,
        "rederived_why": d.rederived.why,
        "blocks": [_fate(f) for f in d.blocks],
    }


def _fate(f: BlockFate) -> dict[str, Any]:
    return {
        "block_id": f.block.block_id,
        "start": f.block.start,
        "stop": f.block.stop,
        "kind": f.block.kind,
        "class": str(f.block.cache_class),
        "last_used_turn": f.block.last_used,
        "score_low": f.score_low,
        "score_high": f.score_high,
        "rank": f.rank,
        "fate": f.fate,
        "evicted": None if f.evicted is None else list(f.evicted),
        "why": f.why,
    }


def _alternative(a: Alternative) -> dict[str, Any]:
    return {
        "policy": a.policy,
        "error": a.error,
        "due": a.due,
        "budget_tokens": a.budget_tokens,
        "kept_tokens": a.kept_tokens,
        "evict": a.evict.as_pairs(),
        "evicted_tokens": None if a.kept_tokens is None else a.evict.n_tokens,
        "evicts_only": a.evicts_only.as_pairs(),
        "keeps_only": a.keeps_only.as_pairs(),
        "overflows": a.overflows,
        "diagnostics": list(a.diagnostics),
    }


def explained_sections(body: dict[str, Any]) -> list[Section]:
    """Tables for people, from the body."""
    sections = [Section(f"event {body['seq']} of session {body['session_id']}", ("what", "value"), _event_rows(body))]
    decision = body["decision"]
    if decision is None:
        return sections
    sections.append(Section(f"plan of event {body['plan_seq']}", ("what", "value"), _plan_rows(body, decision)))
    rows, more = _block_rows(decision), 0
    if len(rows) > _MOST_ROWS:
        rows, more = rows[:_MOST_ROWS], len(rows) - _MOST_ROWS
    columns = ("tokens", "kind", "class", "last used, turn", "score", "rank", "fate", "why")
    sections.append(Section("what was resident", columns, rows))
    if more:
        sections.append(Section(None, (), [(f"... and {more} more; --json has all",)]))
    if body["alternatives"]:
        names = ("policy", "keeps", "evicts", "evicts, recorded kept", "keeps, recorded evicted", "note")
        others = [_alternative_row(a) for a in body["alternatives"]]
        sections.append(Section("what other policies would have done", names, others))
    if body["hindsight"]:
        became = [(o["tokens"], _ranges(o["ranges"]), o["seq"], _outcome(o)) for o in body["hindsight"]]
        sections.append(Section("what became of what went", ("tokens", "which", "event", "what"), became))
    return sections


def _outcome(o: dict[str, Any]) -> str:
    turns = f", {o['turns']} turns in all" if o["turns"] > 1 else ""
    return _OUTCOMES[o["what"]] + turns


def _event_rows(body: dict[str, Any]) -> list[tuple[str, Any]]:
    span = "" if body["range"] is None else f" [{body['range'][0]}, {body['range'][1]})"
    rows: list[tuple[str, Any]] = [
        ("what", f"{body['op']}{span}, turn {body['turn']}" + (f", {body['reason']}" if body["reason"] else ""))
    ]
    why, computed = body["why_computed"], body["computed"]
    if why is not None:
        rows.append(("computed", f"{why['tokens']} tokens: {why['reason'].replace('_', ' ')}"))
    if computed is not None:
        if computed["new"]:
            rows.append(("new on the tape", _ranges(computed["new"])))
        if computed["cut"]:
            cut = f"event {computed['cut_seq']} ({computed['cut_reason']})"
            rows.append(("resident until cut", f"{_ranges(computed['cut'])} by {cut}"))
        rows += [("evicted before", _taken(e)) for e in computed["evicted"]]
    rows += [("had been evicted", _taken(e)) for e in body["evicted_by"]]
    rows.append(("decided by", _decided_by(body)))
    return rows


def _decided_by(body: dict[str, Any]) -> str:
    if body["plan_seq"] is not None:
        return f"the plan of event {body['plan_seq']}"
    asked = {"asked": "the caller; no plan", "hole": f"the prompt of turn {body['turn']}, which has them; no plan"}
    return asked.get(body["reason"] or "", "no plan")


def _taken(e: dict[str, Any]) -> str:
    who = "asked for by the caller" if e["plan_seq"] is None else f"planned by event {e['plan_seq']}"
    return f"{_ranges(e['ranges'])} by event {e['seq']}, {who}"


def _plan_rows(body: dict[str, Any], d: dict[str, Any]) -> list[tuple[str, Any]]:
    again = {
        "equal": "yes, range for range",
        "within_bounds": "as far as the scores on record say",
        "differs": "NO",
        "impossible": "cannot be asked",
    }[d["rederived"]]
    rows = [
        ("policy", d["policy"]),
        ("asked", f"room for {d['incoming_tokens']} tokens, {d['trigger']} limit {d['limit_tokens']}"),
        ("resident", f"{d['total_tokens']} tokens: {_ranges(body['resident'])}"),
        ("budget", f"{d['budget_tokens']}, so {d['need_tokens']} had to go, of {d['total_tokens']}"),
        ("protected", d["protected_tokens"]),
        ("kept", f"{d['hot_tokens']}: {_ranges(d['keep'])}"),
        ("evicted", f"{d['freed_tokens']}: {_ranges([r[1:] for r in d['evict']])}"),
        ("ranked by", d["ranked_by"] or "unknown"),
    ]
    if d["threshold"] is not None:
        rows.append(("highest score that went", d["threshold"]))
    if d["diagnostics"]:
        rows.append(("diagnostics", ", ".join(d["diagnostics"])))
    rows.append(("comes out again", again + (f": {d['rederived_why']}" if d["rederived_why"] else "")))
    return rows


def _block_rows(d: dict[str, Any]) -> list[Sequence[Any]]:
    """One row a block; neighbours that are alike in all that is shown are one."""
    rows: list[list[Any]] = []
    for b in d["blocks"]:
        low, high = b["score_low"], b["score_high"]
        score = low if low == high else f"{low:.3g} to {high:.3g}"
        fate = b["fate"] if b["fate"] != "split" else f"split, {_ranges([b['evicted']])} evicted"
        alike = [b["kind"], b["class"], b["last_used_turn"], score, b["rank"], fate, _because(b, d)]
        if rows and rows[-1][0][1] == b["start"] and rows[-1][1:] == alike:
            rows[-1][0] = (rows[-1][0][0], b["stop"])
        else:
            rows.append([(b["start"], b["stop"]), *alike])
    return [(_ranges([row[0]]), *row[1:]) for row in rows]


def _because(b: dict[str, Any], d: dict[str, Any]) -> str:
    if b["why"] != "ranked":
        return _BECAUSE.get(b["why"], str(b["why"]))
    if b["rank"] is None:
        known = b["score_low"] is not None
        return "ranked by a score that is known within bounds" if known else "ranked by what is not in the log"
    return "among the first to go" if b["fate"] != "kept" else "enough had gone before its turn"


def _alternative_row(a: dict[str, Any]) -> tuple[Any, ...]:
    if a["error"] is not None:
        return (a["policy"], None, None, None, None, a["error"])
    notes = list(a["diagnostics"])
    if not a["due"]:
        notes.append("never evicts" if a["policy"].startswith("none") else "no plan due: it fits its budget")
    if a["overflows"]:
        notes.append("no room for the next token: the operation would be refused")
    return (
        a["policy"],
        a["kept_tokens"],
        f"{a['evicted_tokens']}: {_ranges(a['evict'])}",
        _ranges(a["evicts_only"]),
        _ranges(a["keeps_only"]),
        "; ".join(notes) or None,
    )


def _ranges(pairs: Sequence[Sequence[int]]) -> str:
    from kvtape.cli.logs import ranges_text

    return ranges_text(RangeSet((a, b) for a, b in pairs))
