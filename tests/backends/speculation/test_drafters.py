"""Who proposes: the tape itself, or a draft model that follows it; the vocabulary that two models share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtape.backends.errors import UsageError
from kvtape.backends.speculation.artifacts import add_artifact
from kvtape.backends.speculation.draft_model import DraftModel
from kvtape.backends.speculation.lookup import PromptLookup
from kvtape.backends.speculation.spec import parse_speculation
from kvtape.backends.speculation.vocabulary import check_same_vocabulary
from kvtape.capacity.errors import ModelFileError
from kvtape.planner.grammar import SpecError
from support import llama_tiny
from support.toys import toy_backend

pytestmark = pytest.mark.contract("I7")


def naive(tape: list[int], ngram: int, tokens: int) -> list[int]:
    """The last earlier place where the longest ending stands, searched from the end."""
    for n in range(min(ngram, len(tape) - 1), 0, -1):
        for end in range(len(tape) - 1, n - 1, -1):
            if tape[end - n : end] == tape[-n:]:
                return tape[end : end + tokens]
    return []


tapes = st.lists(st.integers(0, 4), max_size=40)


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 40), tapes), max_size=6), ngram=st.integers(1, 4), tokens=st.integers(1, 6)
)
def test_lookup_finds_the_last_place_of_the_longest_ending(
    steps: list[tuple[int, list[int]]], ngram: int, tokens: int
) -> None:
    """Also over tapes that are cut and go on otherwise."""
    lookup, tape = PromptLookup(ngram=ngram, tokens=tokens), list[int]()
    for cut, more in steps:
        tape = [*tape[:cut], *more]
        assert list(lookup.draft(tape, 9)) == naive(tape, ngram, tokens)
        assert list(lookup.draft(tape, 2)) == naive(tape, ngram, min(2, tokens))


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(3, 40), min_size=1, max_size=30)), max_size=5))
@example(steps=[(0, [3] * 30), (15, [3])])  # cut to just behind where its own context begins
def test_a_draft_model_says_what_its_model_says_of_the_end_of_the_tape(steps: list[tuple[int, list[int]]]) -> None:
    """Whatever was cut since, and also past its own context: then of the last half a context at least."""
    backend, tape = toy_backend(n_ctx=32), list[int]()
    drafter = DraftModel(backend, name="toy", tokens=3)
    for cut, more in steps:
        tape = [*tape[:cut], *more]
        found = list(drafter.draft(tape, 8))
        held = backend.books()[0].length - 2  # the last proposal is not computed
        assert min(len(tape), 16) <= held <= 29
        assert found == greedily(tape[-held:], 3)
        assert list(drafter.draft(tape, 1)) == found[:1]
        assert list(drafter.draft(tape, 0)) == []
    drafter.close()
    drafter.close()
    assert backend.closed >= 1


def greedily(tape: list[int], n: int) -> list[int]:
    backend = toy_backend(n_ctx=64)
    logits = backend.prefill(tape, 0).logits
    return list(backend.decode_until(n, 64, len(tape), logits, lambda x: int(x.argmax())).tokens)


def test_specs_are_canonical() -> None:
    assert parse_speculation("lookup").spec == "lookup:ngram=3,tokens=8"
    assert parse_speculation("lookup:tokens=5").spec == "lookup:ngram=3,tokens=5"
    for text in ("lookup:", "Lookup", "lookup:ngram=0", "lookup:tokens=32", "draft:tokens=2"):
        with pytest.raises(SpecError):
            parse_speculation(text)


def test_vocabularies_are_compared_token_by_token(tmp_path: Path) -> None:
    one, other = llama_tiny.model_file(), llama_tiny.model_file(n_merges=20)
    check_same_vocabulary(one, llama_tiny.model_file(seed=3))
    with pytest.raises(UsageError, match="its vocabulary is not that of"):
        check_same_vocabulary(one, other)
    with pytest.raises(UsageError, match="take two of a kind"):
        check_same_vocabulary(tmp_path, one)
    with pytest.raises(UsageError, match=r"no openvino_tokenizer\.xml"):
        check_same_vocabulary(tmp_path, tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"nothing")
    with pytest.raises(ModelFileError):
        check_same_vocabulary(one, tmp_path / "a.gguf")


def test_what_is_no_model_is_not_read_through_before_it_is_refused(tmp_path: Path) -> None:
    """A folder that was named by mistake may be a whole disk; here something in it cannot be read."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "unreadable").symlink_to("/proc/self/mem")
    with pytest.raises(ModelFileError, match=r"no openvino_model\.xml in this folder"):
        add_artifact("a", tmp_path / "folder", "draft", tmp_path / "models.json")
    with pytest.raises(UsageError, match="begin with a letter or digit"):
        add_artifact("a b", tmp_path / "folder", "draft", tmp_path / "models.json")
    assert not (tmp_path / "models.json").exists()
