"""The identities of a session's counters (I4), as SQL over a log: each gives the rows that break it.

Queries read `events` alone and give `run_id, session_id, seq, what`. Rows without a counter claim nothing, so imported
sessions are held to what their source said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtape.planner.deferral import DEFERRED_PROMPT

__all__ = ["IDENTITIES", "Identity", "IdentityCheck", "check_identities"]

Query = Callable[[str], Sequence[Sequence[Any]]]
"""Runs one SELECT and gives its rows."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`subject`: which rows it speaks of, as a condition; `broken`: the query for those that break it."""

    name: str
    says: str
    subject: str
    broken: str


@dataclass(frozen=True, slots=True)
class IdentityCheck:
    """`rows` it was held against; `broken` as `(run, session, seq, what)`, in the log's order."""

    name: str
    rows: int
    broken: tuple[tuple[str, str, int, str], ...]


def _simple(name: str, says: str, subject: str, wrong: str, what: str) -> Identity:
    query = f"SELECT run_id, session_id, seq, {what} AS what FROM events WHERE ({subject}) AND ({wrong})"
    return Identity(name, says, subject, query)


_COUNTED = "coalesce(reused, suffix) IS NOT NULL"
# A prompt that bears its turn's counters itself, with tokens to prefill, is from a source that tells of no prefill.
_TAKEN_BACK = "('cancelled', 'overflow', 'choice_failed', 'refused')"

_DROPPED = """
WITH before AS (
  SELECT *,
    last_value(resident_tokens IGNORE NULLS) OVER (
      PARTITION BY run_id, session_id ORDER BY seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS had,
    max(CASE WHEN op = 'prompt' THEN seq END) OVER (PARTITION BY run_id, session_id ORDER BY seq) AS prompt
  FROM events),
turns AS (
  SELECT t.*, coalesce(p.had, 0) AS old,
    coalesce((SELECT sum(h.n_tokens) FROM before h WHERE h.run_id = t.run_id AND h.session_id = t.session_id
      AND h.prompt = t.prompt AND h.op IN ('admit', 'recompute') AND h.reason = 'hole'), 0) AS filled
  FROM before t JOIN before p ON p.run_id = t.run_id AND p.session_id = t.session_id AND p.seq = t.prompt
  WHERE t.dropped IS NOT NULL)
SELECT run_id, session_id, seq,
  format('dropped {} + reused {} - filled again {} is not the {} that were resident', dropped, reused, filled, old)
FROM turns WHERE dropped + reused - filled <> old
"""

_SUMS = f"""
WITH marked AS (
  SELECT *, count(*) FILTER (WHERE {_COUNTED}) OVER (PARTITION BY run_id, session_id ORDER BY seq) AS turn_no
  FROM events),
turns AS (
  SELECT run_id, session_id, turn_no, min(seq) FILTER (WHERE {_COUNTED}) AS seq,
    max(coalesce(prefilled, suffix)) FILTER (WHERE {_COUNTED} AND (op = 'prefill' OR prefilled = 0)) AS wanted,
    coalesce(sum(n_tokens) FILTER (WHERE op = 'prefill'), 0) AS done,
    bool_or(op IN ('fatal', 'lost', 'refuse', 'close') OR (op = 'truncate' AND reason IN {_TAKEN_BACK})) AS cut,
    max(seq) AS last
  FROM marked WHERE turn_no > 0 GROUP BY ALL),
ends AS (SELECT *, last = max(last) OVER (PARTITION BY run_id, session_id) AS is_last FROM turns)
SELECT run_id, session_id, seq, format('{{}} tokens were to be prefilled, the events prefill {{}}', wanted, done)
FROM ends WHERE wanted IS NOT NULL AND (done > wanted OR (done < wanted AND NOT cut AND NOT is_last))
"""

# Offered by prompts that wait, and computed, since the last prefix: equal whenever a token is asked for. A refusal and
# what is taken back leave some of it waiting; behind those, and behind a restore, nothing is claimed until the next.
_WAITING = f"""
WITH marked AS (
  SELECT *, {DEFERRED_PROMPT} AS waits,
    count(*) FILTER ({DEFERRED_PROMPT} AND reused IS NOT NULL) OVER so_far AS group_no
  FROM events WINDOW so_far AS (PARTITION BY run_id, session_id ORDER BY seq)),
summed AS (
  SELECT run_id, session_id, seq, op,
    coalesce(sum(coalesce(prefilled, suffix)) FILTER (waits) OVER so_far, 0) AS offered,
    coalesce(sum(n_tokens) FILTER (op = 'prefill') OVER so_far, 0) AS done,
    coalesce(bool_or(waits) OVER so_far, false) AS claims,
    coalesce(bool_or(op IN ('restore', 'lost', 'refuse') OR (op = 'prompt' AND NOT waits)
      OR (op = 'truncate' AND reason IN {_TAKEN_BACK})) OVER so_far, false) AS cut
  FROM marked WINDOW so_far AS (PARTITION BY run_id, session_id, group_no ORDER BY seq))
SELECT run_id, session_id, seq,
  format('{{}} tokens were offered to be computed later, {{}} were', offered, done) AS what
FROM summed WHERE op = 'generate' AND claims AND NOT cut AND offered <> done
"""

_ASKED = """
WITH marked AS (
  SELECT *, count(*) FILTER (WHERE op = 'generate') OVER (PARTITION BY run_id, session_id ORDER BY seq) AS call
  FROM events),
calls AS (
  SELECT run_id, session_id, call, min(seq) FILTER (WHERE op = 'generate') AS seq,
    max(n_tokens) FILTER (WHERE op = 'generate') AS asked, coalesce(sum(completion_tokens), 0) AS done
  FROM marked WHERE call > 0 GROUP BY ALL)
SELECT run_id, session_id, seq, format('{} tokens were asked for, {} were generated', asked, done)
FROM calls WHERE done > asked
"""

IDENTITIES: tuple[Identity, ...] = (
    _simple(
        "prefix",
        "reused + forgotten + prefilled is the prefix that was offered",
        "reused IS NOT NULL",
        "reused + coalesce(forgotten, 0) + coalesce(prefilled, 0) IS DISTINCT FROM prompt_tokens",
        "format('reused {} + forgotten {} + prefilled {} is not the prefix of {} tokens', "
        "reused, coalesce(forgotten, 0), coalesce(prefilled, 0), coalesce(prompt_tokens::VARCHAR, 'unknown'))",
    ),
    Identity("dropped", "dropped + what is reused of it is what was resident", "dropped IS NOT NULL", _DROPPED),
    _simple(
        "suffix",
        "a suffix is offered whole, and is no part of the prefix",
        "suffix IS NOT NULL",
        "suffix IS DISTINCT FROM prompt_tokens OR reused IS NOT NULL",
        "format('suffix {}, offered {}', suffix, coalesce(prompt_tokens::VARCHAR, 'nothing'))",
    ),
    Identity("sums", "the pieces of a turn add up to what was to be prefilled", _COUNTED, _SUMS),
    Identity("waiting", "what waits is computed before anything is generated", DEFERRED_PROMPT, _WAITING),
    _simple(
        "folded",
        "a piece that a decode computes of what waited is counted whole",
        "deferred_prefill_tokens IS NOT NULL",
        "op <> 'prefill' OR deferred_prefill_tokens <> n_tokens OR deferred_prefill_calls IS NULL",
        "format('{} of {} tokens deferred', deferred_prefill_tokens, coalesce(n_tokens, 0))",
    ),
    _simple(
        "prefill",
        "the engine computes each token of a piece once, in at least one call",
        "op = 'prefill' AND physical_prefill_tokens IS NOT NULL",
        "physical_prefill_tokens <> n_tokens OR coalesce(physical_prefill_calls, 0) < 1 "
        "OR physical_prefill_calls > n_tokens",
        "format('{} tokens, {} computed in {} calls', n_tokens, physical_prefill_tokens, "
        "coalesce(physical_prefill_calls, 0))",
    ),
    _simple(
        "decode",
        "a generated token is one engine call, unless it was drafted, and one position on the tape",
        "op = 'decode' AND completion_tokens IS NOT NULL",
        "completion_tokens <> n_tokens OR (stop IS NOT NULL AND stop - start <> n_tokens) "
        "OR (drafted_tokens IS NULL AND coalesce(decode_calls, completion_tokens) <> completion_tokens)",
        "format('{} tokens, {} generated in {} calls', n_tokens, completion_tokens, "
        "coalesce(decode_calls, completion_tokens))",
    ),
    _simple(
        "drafts",
        "a drafted token is accepted or rejected, and what is generated was accepted or is one of a call",
        "coalesce(drafted_tokens, accepted_tokens, rejected_tokens) IS NOT NULL",
        "op <> 'decode' OR drafted_tokens IS DISTINCT FROM accepted_tokens + rejected_tokens "
        "OR coalesce(accepted_tokens >= completion_tokens, true) "
        "OR coalesce(completion_tokens > accepted_tokens + decode_calls, true)",
        "format('drafted {}, accepted {}, rejected {}: {} generated in {} calls', "
        "coalesce(drafted_tokens::VARCHAR, '-'), coalesce(accepted_tokens::VARCHAR, '-'), "
        "coalesce(rejected_tokens::VARCHAR, '-'), coalesce(completion_tokens::VARCHAR, '-'), "
        "coalesce(decode_calls::VARCHAR, '-'))",
    ),
    Identity("asked", "no more is generated than was asked for", "op = 'generate'", _ASKED),
    _simple(
        "recomputed",
        "what is computed again is counted as such: a range, or all survivors of a rebuild",
        "recomputed_tokens IS NOT NULL AND physical_prefill_tokens IS NOT NULL",
        "recomputed_tokens <> physical_prefill_tokens "
        "OR recomputed_tokens <> CASE WHEN op = 'recompute' THEN n_tokens ELSE resident_tokens END",
        "format('{} tokens computed again, {} by the engine', recomputed_tokens, physical_prefill_tokens)",
    ),
    _simple(
        "source",
        "every count says whether the engine gave it",
        "op IN ('prefill', 'decode') AND coalesce(physical_prefill_tokens, completion_tokens) IS NOT NULL",
        "coalesce(token_count_source, '') NOT IN ('engine', 'fallback')",
        "format('counted by {}', coalesce(token_count_source, 'nobody'))",
    ),
)
"""Semantics of the counters, one place."""


def check_identities(query: Query) -> list[IdentityCheck]:
    """Hold every identity against the log that `query` reads."""
    checks: list[IdentityCheck] = []
    for identity in IDENTITIES:
        ((rows,),) = query(f"SELECT count(*) FROM events WHERE {identity.subject}")
        broken = query(f"SELECT * FROM ({identity.broken}) ORDER BY ALL")
        checks.append(IdentityCheck(identity.name, int(rows), tuple((r, s, int(q), w) for r, s, q, w in broken)))
    return checks
