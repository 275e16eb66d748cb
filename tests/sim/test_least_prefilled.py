"""The fewest tokens that any policy has to prefill: first admissions only."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.session import Session
from kvtape.planner.blocks import CacheClass
from kvtape.sim.quality.reuse import least_prefilled
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.running import simulate
from kvtape.sim.world.script import Script, Step, Stretch, Turn
from kvtape.sim.world.settings import Settings
from support.logs import session_row
from support.simulated import MemoryLog, flat_costs, recorded_toy


def prompt(text: str, *, logits: bool = True) -> Step:
    return Step("prefix", len(text), stretches=stretches(text), logits=logits)


def stretches(text: str) -> tuple[Stretch, ...]:
    return (Stretch("user", CacheClass.VOLATILE, tuple(ord(c) for c in text)),)


def script(*turns: list[Step]) -> Script:
    made = tuple(Turn(i + 1, 0, 0, tuple(steps)) for i, steps in enumerate(turns))
    return Script(session_row(), made, "close", 0, "native", 256)


def said(text: str, at: int) -> Step:
    return Step("generate", len(text), at, tuple(ord(c) for c in text))


@pytest.mark.parametrize(
    ("turns", "least"),
    [
        ([], 0),
        ([[prompt("abc")]], 3),
        ([[prompt("abc"), said("de", 3)], [prompt("abcdeXY")]], 5),
        ([[prompt("abcdef")], [prompt("abcXYZ")]], 9),
        ([[prompt("abc")], [prompt("abc")]], 4),  # its logits are wanted again
        ([[prompt("abc")], [prompt("abc", logits=False)]], 3),
        # What a turn went away from could have been kept by whoever knew that it comes back.
        ([[prompt("abcdef")], [prompt("abXY")], [prompt("abcdefgh")]], 6 + 2 + 2),
        ([[prompt("abc")], [Step("suffix", 2, 3, stretches=stretches("de"))]], 5),
        (
            [[prompt("ab"), Step("snapshot", 0), said("cd", 2), Step("restore", 0), said("ef", 2)], [prompt("abcdX")]],
            3,
        ),
    ],
)
def test_only_what_no_earlier_tape_began_with_counts(turns: list[list[Step]], least: int) -> None:
    assert least_prefilled(script(*turns)) == least


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=6))
def test_it_is_the_number_of_different_beginnings(prompts: list[str]) -> None:
    beginnings = {p[:n] for p in prompts for n in range(1, len(p) + 1)}
    found = least_prefilled(script(*[[prompt(p, logits=False)] for p in prompts]))
    assert found == len(beginnings)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=4), st.integers(24, 64))
def test_no_policy_prefills_less(prompts: list[list[int]], n_ctx: int) -> None:
    def play(session: Session) -> None:
        for tokens in prompts:
            session.ensure_prefix(tokens)
            session.decode(3, stop_tokens=frozenset())

    scripts = read_scripts(MemoryLog([recorded_toy(play, "none:block=4", n_ctx=128)]))
    for policy in ("none", "class:budget=20,block=4", "stream:sink=2,recent=9,block=4"):
        figures = simulate(scripts, Settings(policy=policy, n_ctx=n_ctx), flat_costs()).figures
        if figures["served"] == figures["turns"]:
            paid = figures["prefilled_tokens"] + figures["recomputed_tokens"]
            assert paid >= figures["opt_prefilled_tokens"] == least_prefilled(scripts[0])
