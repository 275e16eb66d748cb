"""Engine specs: what is accepted, what is refused with the list of what is allowed."""

from __future__ import annotations

import pytest

from kvtape.backends.errors import UsageError
from kvtape.backends.reference.engines import registry as engines
from kvtape.backends.reference.engines.catalogue import EngineEntry
from kvtape.backends.reference.engines.engine import Contract
from kvtape.backends.reference.engines.registry import engine_entries, engine_names, make_engine, parse_engine
from kvtape.planner.grammar import Option


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("standard", "standard"),
        ("full", "standard"),
        ("fp32:window=64", "standard:window=64"),
        ("standard:window_rule=exact", "standard"),
        ("standard:window_rule=legacy,window=3", "standard:window=3,window_rule=legacy"),
        ("no-cache", "no-cache"),
        ("none", "no-cache"),
        ("off", "no-cache"),
        ("markov-residual:window=9", "markov-rs:window=9"),
        ("unlimited", "windowed-checkpoint"),
        ("unlimited-context:window=512", "windowed-checkpoint"),
        ("markov-rs-codec:window=512", "markov-rs-codec"),
        ("boundary-per-layer:codecs=bf16,window=8", "boundary-per-layer:window=8,codecs=bf16"),
        ("boundary-kv:chunk=64", "boundary-kv:chunk=64"),
    ],
)
def test_a_spec_has_one_canonical_text(text: str, spec: str) -> None:
    choice = parse_engine(text)
    assert choice.spec == spec
    assert parse_engine(spec) == choice
    assert make_engine(choice).info.spec == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Standard", f"unknown engine 'Standard', did you mean 'standard'? allowed: {', '.join(engine_names())}"),
        ("standrad", "did you mean 'standard'?"),
        ("standard:windw=3", "unknown option of standard 'windw', did you mean 'window'? allowed: window, window_rule"),
        ("standard:window=0", "at least 1"),
        ("standard:window=many", "whole number of at least 1"),
        ("standard:window_rule=lax", "allowed: exact, legacy"),
        ("no-cache:window=3", "allowed: none"),
        ("standard:window=3,window=4", "given twice"),
        ("standard:", "nothing behind the colon"),
        ("standard:a.b:c", "takes no function"),
    ],
)
def test_what_is_not_understood_is_an_error_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_engine(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_alias_may_fix_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EngineEntry(
        name="coded",
        options={"bits": Option(int, 4, (3, 4)), "block": Option(int, 32, (1, None))},
        contract=Contract.CODEC_BOUNDED,
        make=lambda info, options: make_engine(parse_engine("standard")),
        about="",
        aliases={"c3": "coded:bits=3"},
    )
    monkeypatch.setattr(engines, "engine_entries", lambda: (entry,))
    assert engines.parse_engine("c3").spec == "coded:bits=3"
    assert engines.parse_engine("c3:block=8").spec == "coded:bits=3,block=8"
    with pytest.raises(UsageError, match="c3 is coded:bits=3, so bits= cannot be given"):
        engines.parse_engine("c3:bits=4")


def test_names_are_unique_and_about_is_one_line() -> None:
    entries = engine_entries()
    names = [name for entry in entries for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    assert sorted(names) == engine_names()
    assert all(entry.about and "\n" not in entry.about for entry in entries)
    assert entries[0].name == "standard"
