"""What the parity contract says of things that a session has to ask for: found wrong in a log, row by row.

I5 precision, I6 deferred prefill, I7 speculation. What was asked for stands on the open event (`planner.opening`), so a
log breaks one of them where something was done that nobody asked for, or where its counters do not add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtape.backends.proofs.knobs import precision_subject
from kvtape.backends.protocol import FlashAttention, SessionConfig
from kvtape.planner.deferral import waits
from kvtape.planner.events import Event, Op
from kvtape.planner.opening import Opening, opening_of
from kvtape.planner.residency import IllegalEvent, ResidencyMismatch, ResidencyState, apply, check_event
from kvtape.planner.rows import SessionRow
from kvtape.replay.invariants import Broken

__all__ = ["deferral_findings", "precision_findings", "speculation_findings"]

_SINCE = 2
"""Schema version from which sessions say what they were asked for; older ones claim nothing."""


def precision_findings(session: SessionRow, events: Sequence[Event]) -> list[Broken]:
    """I5: KV types that are a knob were certified or said uncertified when the session opened, and as what they are."""
    opened = next((e for e in events if e.op is Op.OPEN), None)
    if opened is None or opened.schema_version < _SINCE or session.kv_type_k is None or session.kv_type_v is None:
        return []
    said = opening_of(events)
    what = _unsaid(session, said) if said.precision is None else _contradicted(session, said)
    return [] if what is None else [Broken(opened.session_id, opened.seq, what)]


def _unsaid(session: SessionRow, said: Opening) -> str | None:
    """The knob that the row speaks of, where the session says nothing of one."""
    flash: FlashAttention = "on" if session.flash_attention else "off"
    config = SessionConfig(kv_type_k=str(session.kv_type_k), kv_type_v=str(session.kv_type_v), flash_attention=flash)
    knob = precision_subject(session.backend, config)
    if knob is None:
        return None
    return f"opened with {knob}, which is no base precision, and says neither certified nor uncertified"


def _contradicted(session: SessionRow, said: Opening) -> str | None:
    """What of a precision that was said is other than the row's, or is left open."""
    parts = dict(part.partition("=")[::2] for part in str(said.precision).split(","))
    row = {"k": session.kv_type_k, "v": session.kv_type_v}
    # Asked for `auto`, flash attention is what came of it.
    if parts.get("fa") in ("on", "off"):
        row["fa"] = "on" if session.flash_attention else "off"
    if any(parts.get(key) != value for key, value in row.items()):
        told = ",".join(f"{key}={value}" for key, value in row.items())
        return f"says that its precision is {said.precision}, its row says {told}"
    return f"opened with {said.precision}, and does not say whether it is certified" if said.certified is None else None


def deferral_findings(events: Sequence[Event]) -> list[Broken]:
    """I6: nothing waits unasked, and what a decode computes of it was waiting and is counted whole."""
    return list(_deferral(events, asked=opening_of(events).defer_prefill))


def _deferral(events: Sequence[Event], *, asked: bool) -> Iterator[Broken]:
    waiting = 0  # prompts that were put off and not yet folded into a decode or replaced
    folded = 0  # of those that were, what waits again if the decode is taken back before it asks for a token
    for e in events:
        calls, tokens = e.deferred_prefill_calls or 0, e.deferred_prefill_tokens or 0
        if not asked and (waits(e) or calls or tokens):
            yield Broken(e.session_id, e.seq, f"{e.op} was deferred, although the session did not ask for it")
        waiting += waits(e)
        if e.op is Op.TRUNCATE:
            waiting += folded
        if e.op in (Op.TRUNCATE, Op.GENERATE):
            folded = 0
        if tokens and (e.op is not Op.PREFILL or tokens != e.n_tokens):
            yield Broken(e.session_id, e.seq, f"{tokens} deferred tokens on a {e.op} of {e.n_tokens}")
        if calls > waiting:
            yield Broken(e.session_id, e.seq, f"{calls} deferred prefills are computed, {waiting} were waiting")
        if calls and not tokens:
            yield Broken(e.session_id, e.seq, f"{calls} deferred prefills without a token")
        waiting, folded = max(0, waiting - calls), folded + calls


def speculation_findings(events: Sequence[Event]) -> list[Broken]:
    """I7: nothing is drafted unasked, drafted is accepted + rejected, and what a decode leaves is what the fold has."""
    asked = opening_of(events).speculation is not None
    found: list[Broken] = []
    state: ResidencyState | None = ResidencyState()
    for e in events:
        drafted = (e.drafted_tokens, e.accepted_tokens, e.rejected_tokens)
        told = any(n is not None for n in drafted)
        found += [Broken(e.session_id, e.seq, what) for what in _counted(e, asked=asked)] if told else []
        try:
            state = None if state is None else apply(state, e)
            if told and state is not None:
                check_event(state, e)
        except ResidencyMismatch as err:
            found.append(Broken(e.session_id, e.seq, f"{err.what} after a decode is another than the fold's"))
        except IllegalEvent:
            state = None  # from here on nothing can be folded; other invariants and verify say why
    return found


def _counted(event: Event, *, asked: bool) -> Iterator[str]:
    """What is wrong with the counters of one event that has some."""
    drafted, accepted, rejected = event.drafted_tokens, event.accepted_tokens, event.rejected_tokens
    if not asked:
        yield f"{event.op} was speculated, although the session did not ask for it"
    if event.op is not Op.DECODE:
        yield f"a {event.op} has counters of speculation"
    if drafted is None or accepted is None or rejected is None or drafted != accepted + rejected:
        yield f"drafted {drafted} is not accepted {accepted} + rejected {rejected}"
    elif accepted > (event.n_tokens or 0):
        yield f"accepted {accepted} of {event.n_tokens} tokens"
    elif event.decode_calls is not None and (event.n_tokens or 0) > accepted + event.decode_calls:
        yield f"{event.n_tokens} tokens from {event.decode_calls} calls and {accepted} accepted ones"
