"""What a turn's span says in the words of the GenAI conventions, and which events happened in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtape.planner.events import Op
from kvtape.traces.exporters.otlp_values import attributes

__all__ = ["events_of", "turn_attributes"]

Row = Mapping[str, Any]

_TOLD = frozenset(
    {
        Op.TRUNCATE,
        Op.PLAN,
        Op.EVICT,
        Op.ADMIT,
        Op.SHIFT,
        Op.TRIM,
        Op.SNAPSHOT,
        Op.RESTORE,
        Op.REFUSE,
        Op.LOST,
        Op.FATAL,
    }
)
_PROVIDERS = {"llama": "llama.cpp", "llama-server": "llama.cpp"}
"""Names of backends and formats as names of providers; the conventions have none for engines that run at home."""


def turn_attributes(turn: int, rows: Sequence[Row], session: Row, *, chat: bool, imported: bool) -> dict[str, Any]:
    """What the log does not know is None.

    Input tokens include those that were cached, as the conventions want it. Cached are those that were resident: what a
    policy had evicted, and was not computed again either, is counted apart.
    """
    said = _detail(rows)
    prompt = next((row for row in rows if row["op"] == Op.PROMPT), None)
    told: dict[str, Any] = {
        "gen_ai.operation.name": said.get("gen_ai.operation.name") or ("chat" if chat else "text_completion"),
        "gen_ai.provider.name": said.get("gen_ai.provider.name")
        or _PROVIDERS.get(session["backend"], session["backend"]),
        "gen_ai.request.model": said.get("model") or session["model_name"],
        "gen_ai.conversation.id": session["session_id"],
        "gen_ai.usage.input_tokens": _sum(rows, "prompt_tokens"),
        "gen_ai.usage.cache_read.input_tokens": _sum(rows, "reused"),
        "gen_ai.usage.output_tokens": _sum(rows, "completion_tokens"),
        "gen_ai.response.finish_reasons": _finish_reasons(rows, imported=imported),
        "kvtape.turn": turn,
        "kvtape.usage.forgotten_tokens": _sum(rows, "forgotten"),
    }
    if prompt is not None and prompt["elapsed_ns"] is not None:
        told["gen_ai.response.time_to_first_chunk"] = prompt["elapsed_ns"] / 1e9
    return told


def events_of(rows: Sequence[Row], shift: int) -> Iterator[dict[str, Any]]:
    """Span events: what was decided and done beside computing. An error says its class, as its text may be anything."""
    for row in rows:
        if row["op"] not in _TOLD:
            continue
        told = {
            "kvtape.seq": row["seq"],
            "kvtape.start": row["start"],
            "kvtape.stop": row["stop"],
            "kvtape.tokens": row["n_tokens"],
            "kvtape.way": None if row["way"] is None else str(row["way"]),
            "kvtape.cold": row["cold"],
            "kvtape.reason": None if row["op"] in (Op.REFUSE, Op.FATAL) else row["reason"],
            "kvtape.resident_tokens": row["resident_tokens"],
            "error.type": row["error_class"],
        }
        name = f"kvtape.{row['op']}"
        yield {"timeUnixNano": str(shift + row["at_ns"]), "name": name, "attributes": attributes(told)}


def _sum(rows: Sequence[Row], column: str) -> int | None:
    known = [row[column] for row in rows if row[column] is not None]
    return sum(known) if known else None


def _finish_reasons(rows: Sequence[Row], *, imported: bool) -> list[str] | None:
    """`error` after a fatal event, and what an import's source says. Else by the last run of tokens: `length` when it
    is as long as was asked, `stop` when something ended it before. None where nothing was generated.
    """
    if any(row["op"] == Op.FATAL for row in rows):
        return ["error"]
    asked = [i for i, row in enumerate(rows) if row["op"] == Op.GENERATE]
    if not asked:
        return None
    last, behind = rows[asked[-1]], rows[asked[-1] + 1 :]
    if imported:
        return None if last["reason"] is None else [last["reason"]]
    made = _sum(behind, "completion_tokens")
    return None if made is None else ["length" if made >= (last["n_tokens"] or 0) else "stop"]


def _detail(rows: Sequence[Row]) -> dict[str, Any]:
    """What an import's source said beside its columns."""
    text = next((row["detail"] for row in rows if row["op"] == Op.PROMPT and row["detail"]), None)
    value = json.loads(text) if text else {}
    return value if isinstance(value, dict) else {}
