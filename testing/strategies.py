"""Hypothesis strategies for what kvtape's pure parts take: blocks, capabilities, policies, prompts, event logs.

Needs hypothesis: `pip install 'kvtape[testing]'`. All sizes in tokens; every draw is legal unless a docstring says
otherwise, and shrinks towards few, small and plain.
"""

from __future__ import annotations

from typing import Any

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as err:
    raise ModuleNotFoundError(
        "kvtape.testing.strategies needs hypothesis; pip install 'kvtape[testing]'", name="hypothesis"
    ) from err

from kvtape.planner.blocks import Block, CacheClass, Flag, PromptSegment
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import Event
from kvtape.planner.policy_options import POLICY_NAMES
from kvtape.planner.specs import PolicySpec, parse_policy
from kvtape.testing.event_script import EventScript

__all__ = ["block_lists", "capabilities", "event_logs", "policies", "policy_texts", "prompts", "token_lists"]

SEGMENT_KINDS = ("user", "assistant", "system", "tools", "repo_map", "diff", "something else")


def token_lists(n_vocab: int = 64, min_size: int = 1, max_size: int = 64) -> st.SearchStrategy[list[int]]:
    """Token ids below `n_vocab`."""
    return st.lists(st.integers(0, n_vocab - 1), min_size=min_size, max_size=max_size)


@st.composite
def block_lists(
    draw: st.DrawFn,
    *,
    max_blocks: int = 12,
    max_tokens: int = 9,
    scored: bool = False,
    gaps: bool = False,
    holes: bool = True,
) -> list[Block]:
    """Disjoint blocks in any order, ids unrelated to their places, with `holes` between some.

    Every class and flag occurs. `scored` blocks bear finite scores from a small set, so that ties occur; with `gaps`
    some bear none.
    """
    scores: list[float | None] = [0.0, 0.25, 1.0, 8.0, *([None] if gaps else [])]
    lengths = draw(st.lists(st.integers(1, max_tokens), max_size=max_blocks))
    ids = draw(st.permutations(range(len(lengths))))
    blocks: list[Block] = []
    at = 0
    for block_id, length in zip(ids, lengths, strict=True):
        at += draw(st.integers(0, 3)) if holes else 0
        blocks.append(
            Block(
                block_id=block_id,
                start=at,
                stop=at + length,
                kind=draw(st.sampled_from(SEGMENT_KINDS)),
                # Mostly what may be evicted: a list of protected blocks asks nothing of a plan.
                cache_class=draw(st.sampled_from([CacheClass.VOLATILE] * 3 + list(CacheClass))),
                flags=draw(st.sampled_from([Flag(0)] * 4 + list(Flag))),
                last_used=draw(st.integers(0, 3)),
                score=draw(st.sampled_from(scores)) if scored else None,
            )
        )
        at += length
    return draw(st.permutations(blocks))


def capabilities(**fixed: bool | int) -> st.SearchStrategy[Capabilities]:
    """Any combination of abilities; `fixed` ones are as given."""
    names = [n for n in Capabilities.__dataclass_fields__ if n != "sliding_window_attention_tokens"]
    drawn: dict[str, st.SearchStrategy[Any]] = {n: st.booleans() for n in names}
    drawn["sliding_window_attention_tokens"] = st.sampled_from([0, 0, 8, 128])
    return st.builds(Capabilities, **drawn | {name: st.just(value) for name, value in fixed.items()})


@st.composite
def policy_texts(draw: st.DrawFn, names: tuple[str, ...] = POLICY_NAMES, *, max_tokens: int = 64) -> str:
    """Valid spec texts of these policies; sink + recent + 1 is at most `max_tokens`, and so is the budget."""
    name = draw(st.sampled_from(names))
    sink = draw(st.integers(0, max_tokens // 4))
    recent = draw(st.integers(1, max_tokens // 2))
    options: dict[str, object] = {}
    if name not in ("none", "stream"):
        options["budget"] = draw(st.integers(sink + recent + 1, max_tokens))
    if name != "none":
        options |= {"sink": sink, "recent": recent}
    if name == "random":
        options["seed"] = draw(st.integers(0, 9))
    if name == "snapkv":
        options["window"] = recent
    common: dict[str, st.SearchStrategy[Any]] = {
        "positions": st.sampled_from(["auto", "gap", "rebased"]),
        "every": st.integers(1, 8),
        "hole": st.sampled_from(["forget", "refill"]),
        "block": st.sampled_from([1, 4, 8, 32]),
    }
    if name != "none":
        common["split"] = st.sampled_from(["yes", "no"])
    options |= draw(st.fixed_dictionaries({}, optional=common))
    return name + (":" + ",".join(f"{k}={v}" for k, v in options.items()) if options else "")


def policies(names: tuple[str, ...] = POLICY_NAMES, *, max_tokens: int = 64) -> st.SearchStrategy[PolicySpec]:
    """`policy_texts`, parsed."""
    return policy_texts(names, max_tokens=max_tokens).map(parse_policy)


def prompts(n_vocab: int = 64, max_segments: int = 4, max_size: int = 24) -> st.SearchStrategy[list[PromptSegment]]:
    """Prompts of a few tokenised segments of any kind."""
    segment = st.builds(
        lambda kind, tokens, stable: PromptSegment(kind=kind, tokens=tuple(tokens), stable=stable),
        st.sampled_from(SEGMENT_KINDS),
        token_lists(n_vocab, 1, max_size),
        st.booleans(),
    )
    return st.lists(segment, min_size=1, max_size=max_segments)


@st.composite
def event_logs(draw: st.DrawFn, *, n_ctx: int = 64, max_events: int = 25, ends: bool = True) -> list[Event]:
    """The events of one legal session, with the digests that the fold gives: `planner.residency.fold` takes them.

    Every operation occurs, blocks in the cold store and snapshots among them; with `ends` some end by close, fatal
    or lost events.
    """
    script = EventScript(n_ctx)
    for _ in range(draw(st.integers(0, max_events - 2))):
        name = draw(st.sampled_from(script.possible()))
        script.step(name, draw(st.integers(0, 999)), draw(st.integers(0, 999)))
    if ends:
        script.end(draw(st.sampled_from(["open", "close", "fatal", "lost"])))
    return script.events
