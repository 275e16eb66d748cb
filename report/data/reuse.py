"""What turns found in the cache, and why the rest was computed. From the views `turns` and `why_prefilled`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvtape.traces.reader import Log

__all__ = ["MEANING", "Reason", "Turn", "grouped", "reasons", "turns"]

Key = tuple[str, str]
"""run_id, session_id."""

MEANING = MappingProxyType(
    {
        "cold": "nothing had been computed in the session",
        "diverged": "the tape held other tokens there: the prompt is not the old one continued",
        "evicted": "the tokens had been resident, were evicted, and were computed again",
        "extended": "the prompt goes on past what was on the tape",
        "last_token_for_logits": "the whole prompt was there; its last token is computed for its logits",
        "rebuild_chosen": "the cache was rebuilt although rows could have been taken out",
        "restore_had_no_effect": "a state was restored, and nothing of the common prefix was resident",
        "shift_impossible": "the cache was rebuilt: the session cannot move rows",
        "suffix": "tokens put behind the prefix",
        "surgery_impossible": "the cache was rebuilt: the session cannot take rows out",
        "unknown": "the log does not have the prompt that it was for",
        "window_pruned": "a sliding window had dropped what the prompt needs",
    }
)
"""The reasons of the view `why_prefilled`, in words."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of one turn's prefix, or sums over the turns `first` to `last` of a session.

    `prefilled`: past the common prefix; `suffix`: computed behind it.
    """

    key: Key
    first: int
    last: int
    reused: int
    forgotten: int
    prefilled: int
    suffix: int

    @property
    def prefix(self) -> int:
        return self.reused + self.forgotten + self.prefilled


@dataclass(frozen=True, slots=True)
class Reason:
    """Events in which the engine computed prompt tokens for one reason. `elapsed_ns`: None where nothing was timed."""

    reason: str
    events: int
    tokens: int
    elapsed_ns: int | None


def turns(log: Log, keys: Sequence[Key]) -> list[Turn]:
    """Of these sessions, in their order; turns of which the log does not say what they reused are left out."""
    order = {key: i for i, key in enumerate(keys)}
    found = [
        Turn((run, session), turn, turn, *numbers)
        for run, session, turn, *numbers in log.sql(_TURNS)[1]
        if (run, session) in order
    ]
    return sorted(found, key=lambda t: (order[t.key], t.first))


def grouped(found: Sequence[Turn], most: int) -> list[Turn]:
    """At most about `most` of them: consecutive turns of a session are summed up, as few together as will do."""
    every = max(1, -(-len(found) // most))
    summed: list[Turn] = []
    for turn in found:
        last = summed[-1] if summed else None
        if last is not None and last.key == turn.key and turn.last - last.first < every:
            summed[-1] = Turn(
                turn.key,
                last.first,
                turn.last,
                last.reused + turn.reused,
                last.forgotten + turn.forgotten,
                last.prefilled + turn.prefilled,
                last.suffix + turn.suffix,
            )
        else:
            summed.append(turn)
    return summed


def reasons(log: Log, keys: Collection[Key]) -> list[Reason]:
    """Over all these sessions, most tokens first."""
    sums: dict[str, tuple[int, int, int | None]] = {}
    for run, session, reason, events, tokens, elapsed in log.sql(_REASONS)[1]:
        if (run, session) in keys:
            n, t, e = sums.get(reason, (0, 0, None))
            sums[reason] = (n + events, t + tokens, e if elapsed is None else (e or 0) + elapsed)
    found = [Reason(reason, *numbers) for reason, numbers in sums.items()]
    return sorted(found, key=lambda r: (-r.tokens, r.reason))


_TURNS = """
    SELECT run_id, session_id, turn::BIGINT, reused::BIGINT, coalesce(forgotten, 0)::BIGINT,
        coalesce(prefilled, 0)::BIGINT, suffix::BIGINT
    FROM turns WHERE reused IS NOT NULL ORDER BY ALL"""

_REASONS = """
    SELECT run_id, session_id, reason, count(*)::BIGINT, coalesce(sum(tokens), 0)::BIGINT, sum(elapsed_ns)::BIGINT
    FROM why_prefilled GROUP BY ALL ORDER BY ALL"""
