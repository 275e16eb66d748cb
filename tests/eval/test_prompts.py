"""Prompts: seeded, the fact wholly where it is said to be, the same sentences wherever it stands."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.errors import UsageError
from kvtape.eval.filler import Draws, sentences
from kvtape.eval.needles import FORMATS, draw_needle, is_correct
from kvtape.eval.places import REGIONS, Regions, regions_of
from kvtape.eval.prompts import NeedlePrompt, needle_prompt
from kvtape.eval.texts import long_text, tokens_of

REGION = Regions(64, 128, 96, 256)


def words(text: str) -> list[int]:
    """A tokenizer of bytes: each token is one."""
    return list(text.encode())


def prompt(seed: int, region: str = "middle", n_tokens: int = 1000, format_name: str = "city") -> NeedlePrompt:
    return needle_prompt(words, format_name=format_name, seed=seed, region=region, regions=REGION, n_tokens=n_tokens)


@given(st.integers(0, 10**9), st.sampled_from(REGIONS), st.sampled_from(sorted(FORMATS)), st.integers(700, 1500))
def test_the_fact_is_wholly_in_its_region(seed: int, region: str, format_name: str, n_tokens: int) -> None:
    made = prompt(seed, region, n_tokens, format_name)
    assert len(made.context) <= n_tokens
    assert bytes(made.context[made.start : made.stop]).decode() == made.needle.fact
    sink, recent = made.stop <= REGION.sink, made.start >= len(made.context) - REGION.recent
    outside = REGION.sink_most <= made.start and made.stop <= len(made.context) - REGION.recent_most
    assert {"sink": sink, "recent": recent, "middle": outside}[region]
    assert made.needle.answer not in bytes(made.context[: made.start] + made.context[made.stop :]).decode()
    assert made.needle.answer not in made.needle.question
    assert made == prompt(seed, region, n_tokens, format_name)


@given(st.integers(0, 10**6))
def test_a_seed_has_the_same_sentences_in_every_region(seed: int) -> None:
    fillers = {p.context[: p.start] + p.context[p.stop :] for p in (prompt(seed, r) for r in REGIONS)}
    assert len(fillers) == 1


def test_seeds_differ_in_text_fact_and_place() -> None:
    made = [prompt(seed) for seed in range(40)]
    assert len({p.context for p in made}) == 40
    assert len({p.needle.answer for p in made}) > 10
    assert len({p.start for p in made}) > 5


def test_where_the_fact_has_no_room_it_is_said() -> None:
    with pytest.raises(UsageError, match=r"region sink: no place for the fact of \d+ tokens in \[0, 4\)"):
        needle_prompt(words, format_name="city", seed=1, region="sink", regions=Regions(4, 9, 4, 9), n_tokens=500)
    with pytest.raises(UsageError, match="region middle"):
        prompt(1, n_tokens=300)
    with pytest.raises(UsageError, match="unknown region 'front'; allowed: middle, recent, sink"):
        REGION.bounds("front", 100)
    with pytest.raises(UsageError, match="unknown format 'town'; allowed: city, passkey"):
        draw_needle("town", 1)


def test_regions_are_what_all_windows_keep_and_what_none_keeps() -> None:
    regions = regions_of([(4, 124), (64, 60), (8, 252)])
    assert regions == Regions(4, 60, 64, 252)
    assert [regions.bounds(r, 1000) for r in REGIONS] == [(64, 748), (940, 1000), (0, 4)]


@pytest.mark.parametrize(
    ("said", "right"),
    [(" Oslo.", True), ("Oslo", True), ("\nOslo is", True), (" Oslov", False), (" In Oslo", False), ("", False)],
)
def test_an_answer_is_the_first_word(said: str, right: bool) -> None:
    needle = next(n for n in (draw_needle("city", s) for s in range(200)) if n.answer == "Oslo")
    assert is_correct(needle, said) is right


def test_draws_are_even_and_their_streams_apart() -> None:
    draws = Draws(7)
    counts = [0] * 10
    for _ in range(10_000):
        counts[draws.below(10)] += 1
    assert max(counts) < 1150
    assert min(counts) > 850
    assert [Draws(7, 1).below(1000) for _ in range(3)] != [Draws(7, 2).below(1000) for _ in range(3)]


def test_no_sentence_follows_itself_and_texts_have_the_length_asked() -> None:
    first = list(itertools.islice(sentences(3), 500))
    assert all(a != b for a, b in itertools.pairwise(first))
    assert len(set(first)) > 490
    assert len(long_text(words, 3, 777)) == 777
    assert long_text(words, 3, 777) == long_text(words, 3, 900)[:777]
    assert tokens_of(words, "abc", 2) == (97, 98)
    with pytest.raises(UsageError, match="the text has 3 tokens, --tokens asks for 4"):
        tokens_of(words, "abc", 4)
