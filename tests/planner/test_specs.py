"""The spec grammar, typed options, and the policies of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.blocks import Block, CacheClass
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import Way
from kvtape.planner.ranges import Range
from kvtape.planner.scores import ScoreRequest
from kvtape.planner.specs import (
    REQUIRED,
    Option,
    PolicySpec,
    Spec,
    SpecError,
    parse_options,
    parse_policy,
    parse_spec,
)

SURGERY = Capabilities(remove_middle=True, position_shift=True)


def ones(n: int) -> list[Block]:
    return [Block(i, i, i + 1, "user", CacheClass.VOLATILE) for i in range(n)]


# -- grammar ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("none", Spec("none")),
        ("no-cache", Spec("no-cache")),
        ("openvino:way=recompute", Spec("openvino", (("way", "recompute"),))),
        ("a:x=1,y=b=c,z=/p:q", Spec("a", (("x", "1"), ("y", "b=c"), ("z", "/p:q")))),
        ("pkg.mod:keep", Spec("pkg.mod", (), "pkg.mod:keep")),
        ("pkg.mod:keep,budget=9", Spec("pkg.mod", (("budget", "9"),), "pkg.mod:keep")),
        ("user:pkg.mod:keep,budget=9", Spec("user", (("budget", "9"),), "pkg.mod:keep")),
    ],
)
def test_a_spec_is_read_and_written(text: str, spec: Spec) -> None:
    assert parse_spec(text) == spec
    assert str(spec) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is no name"),
        (":a=1", "'' is no name"),
        ("a b", "'a b' is no name"),
        (" none", "' none' is no name"),
        ("9a", "'9a' is no name"),
        ("a:", "nothing behind the colon"),
        ("a:=1", "'=1' is not key=value"),
        ("a:x=", "'x=' is not key=value"),
        ("a:x=1,", "'' is neither key=value nor module:function"),
        ("a:,x=1", "'' is neither"),
        ("a: x=1", "' x=1' is not key=value"),
        ("a:x=1,x=1", "x is given twice"),
        ("a:b-c", "'b-c' is neither"),
        ("a:b:c:d", "'b:c:d' is neither"),
        ("a:m:f,n:g", "a second function beside m:f"),
    ],
)
def test_a_spec_that_is_none(text: str, why: str) -> None:
    with pytest.raises(SpecError, match="spec") as caught:
        parse_spec(text)
    assert why in str(caught.value)
    assert repr(text) in str(caught.value)


@given(st.text(alphabet="ab:=,. 1-", max_size=12))
def test_any_text_is_a_spec_that_is_written_back_or_a_spec_error(text: str) -> None:
    try:
        spec = parse_spec(text)
    except SpecError:
        return
    assert parse_spec(str(spec)) == spec


# -- options ------------------------------------------------------------------------------------------------------

TABLE: dict[str, Any] = {
    "way": Option(str, "native", ("native", "recompute")),
    "threads": (int, 1, (1, 64)),
    "mirror": (bool, True, None),
    "path": (str, None, None),
}


def test_options_are_typed_and_defaults_filled_in() -> None:
    read = parse_options(parse_spec("openvino:mirror=off,threads=08,path=a/b"), TABLE)
    assert read == {"way": "native", "threads": 8, "mirror": False, "path": "a/b"}
    assert list(read) == list(TABLE)
    assert parse_options(Spec("openvino"), TABLE)["path"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "openvino:wya=native",
            ("unknown option of openvino 'wya', did you mean 'way'? allowed: mirror, path, threads, way"),
        ),
        ("openvino:zzz=1", "unknown option of openvino 'zzz'; allowed: mirror, path, threads, way"),
        (
            "openvino:way=recompte",
            ("openvino:way=recompte: unknown value 'recompte', did you mean 'recompute'? allowed: native, recompute"),
        ),
        (
            "openvino:threads=0",
            ("openvino:threads=0: '0' is not allowed; allowed: a whole number of at least 1 and at most 64"),
        ),
        (
            "openvino:threads=65",
            ("openvino:threads=65: '65' is not allowed; allowed: a whole number of at least 1 and at most 64"),
        ),
        ("openvino:mirror=false", "openvino:mirror=false: 'false' is not understood; allowed: yes, no, on, off"),
        ("openvino:pkg:f", "openvino takes no function (pkg:f); allowed: mirror, path, threads, way"),
    ],
)
def test_an_option_error_lists_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_options(parse_spec(text), TABLE)
    assert str(caught.value) == message


def test_a_required_option_must_be_given() -> None:
    with pytest.raises(SpecError, match=r"^x needs n=; allowed: n$"):
        parse_options(Spec("x"), {"n": Option(int, REQUIRED)})


@pytest.mark.parametrize(
    ("text", "most"),
    [(text, "") for text in ("1.5", "1e3", "+4", "-4", "0x10", "1_000", "٣", "²", "many")]
    + [(text, " and at most 2147483647") for text in ("2147483648", "9" * 5000)],
)
def test_only_plain_whole_numbers_of_32_bits_are_numbers(text: str, most: str) -> None:
    with pytest.raises(SpecError, match=f"a whole number of at least 0{most}$"):
        parse_options(Spec("x", (("n", text),)), {"n": Option(int, 0)})


@pytest.mark.parametrize(
    ("text", "value"), [("10", 10.0), ("0.25", 0.25), ("2.5e-05", 2.5e-5), ("0", 0.0), ("12.", None)]
)
def test_a_decimal_number_is_one_that_is_plainly_written(text: str, value: float | None) -> None:
    if value is not None:
        assert parse_options(Spec("x", (("f", text),)), {"f": Option(float, 1.0, (0.0, None))}) == {"f": value}
        return
    with pytest.raises(SpecError, match=r"x:f=12\.: '12\.' is not allowed; allowed: a number of at least 0\.0$"):
        parse_options(Spec("x", (("f", text),)), {"f": Option(float, 1.0, (0.0, None))})


@pytest.mark.parametrize("text", ["nan", "inf", "1e9", "+1", "0x1p3", ".5", "1_0", "-1", "9" * 5000])
def test_what_is_no_decimal_number_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"a number of at least 0\.0 and at most 5\.0$"):
        parse_options(Spec("x", (("f", text),)), {"f": Option(float, 1.0, (0.0, 5.0))})


@given(st.floats(min_value=-1e9, max_value=1e9, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-90))
def test_a_decimal_number_is_read_as_it_was_written(value: float) -> None:
    assert parse_options(Spec("x", (("f", str(value)),)), {"f": Option(float)}) == {"f": value}


def test_the_largest_number() -> None:
    assert parse_options(parse_spec("x:n=2147483647"), {"n": Option(int, 0)}) == {"n": 2**31 - 1}


# -- policies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy", "canonical"),
    [
        ("none", PolicySpec(name="none", sink=0, recent=1, budget=None, hole="refill", split=False), "none"),
        ("none:hole=forget", PolicySpec(name="none", hole="forget"), "none:hole=forget"),
        (
            "stream:recent=1020,sink=4",
            PolicySpec(name="stream", sink=4, recent=1020, hole="forget", split=True),
            "stream:sink=4,recent=1020",
        ),
        (
            "stream:split=no,block=16,hole=refill,every=8,positions=rebased,recent=508,sink=0",
            PolicySpec(name="stream", sink=0, recent=508, positions="rebased", every=8, hole="refill", block=16),
            "stream:sink=0,recent=508,positions=rebased,every=8,hole=refill,block=16,split=no",
        ),
        (
            "stream:sink=4,recent=1,positions=auto,every=1,hole=forget,block=32,split=yes",
            PolicySpec(name="stream", sink=4, recent=1, hole="forget", split=True),
            "stream:sink=4,recent=1",
        ),
        ("class:budget=2048", PolicySpec(name="class", budget=2048), "class:budget=2048"),
        (
            "class:split=yes,recent=2,sink=0,budget=0064",
            PolicySpec(name="class", budget=64, recent=2, split=True),
            "class:budget=64,recent=2,split=yes",
        ),
        (
            "h2o:recent=8,layers=23+7-8+9,norm=mean,budget=64",
            PolicySpec(name="h2o", budget=64, recent=8, norm="mean", layers="7-9+23", hole="forget"),
            "h2o:budget=64,recent=8,norm=mean,layers=7-9+23",
        ),
        (
            "snapkv:budget=64,window=16,pool=7,grace=4",
            PolicySpec(name="snapkv", budget=64, recent=16, window=16, pool=7, grace=4, layers="late", hole="forget"),
            "snapkv:budget=64,window=16,pool=7,grace=4",
        ),
        (
            "snapkv:budget=64,window=16,recent=24",
            PolicySpec(name="snapkv", budget=64, recent=24, window=16, layers="late", hole="forget"),
            "snapkv:budget=64,recent=24,window=16",
        ),
        (
            "snapkv:budget=64,queries=probe,layers=17-17,heads=max",
            PolicySpec(name="snapkv", budget=64, queries="probe", layers="17", heads="max", hole="forget"),
            "snapkv:budget=64,queries=probe,layers=17,heads=max",
        ),
        (
            "tova:budget=9,split=on",
            PolicySpec(name="tova", budget=9, split=True, layers="late", hole="forget"),
            "tova:budget=9,split=yes",
        ),
        (
            "random:seed=7,budget=9",
            PolicySpec(name="random", budget=9, seed=7, hole="forget"),
            "random:budget=9,seed=7",
        ),
        (
            "mine:json:loads,budget=9,scores=probe,hole=refill",
            PolicySpec(name="user", function="json:loads", budget=9, scores="probe"),
            "json:loads,budget=9,scores=probe,hole=refill",
        ),
    ],
)
def test_a_policy_is_read_and_written(text: str, policy: PolicySpec, canonical: str) -> None:
    assert parse_policy(text) == policy
    assert policy.canonical == canonical
    assert parse_policy(canonical) == policy


@given(
    st.sampled_from(["none", "stream", "class"]),
    st.integers(0, 99),
    st.integers(1, 99),
    st.integers(200, 999),
    st.sampled_from(["auto", "gap", "rebased"]),
    st.integers(1, 40),
    st.sampled_from(["forget", "refill"]),
    st.integers(1, 64),
    st.booleans(),
)
def test_the_canonical_text_names_the_policy(
    name: str, sink: int, recent: int, budget: int, positions: Any, every: int, hole: Any, block: int, split: bool
) -> None:
    common: dict[str, Any] = {"positions": positions, "every": every, "hole": hole, "block": block}
    if name != "none":
        common |= {"sink": sink, "recent": recent, "split": split}
    if name == "class":
        common["budget"] = budget
    policy = PolicySpec(name=name, **common)
    assert parse_policy(policy.canonical) == policy
    assert parse_policy(policy.canonical).canonical == policy.canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "strem:sink=4,recent=8",
            (
                "unknown policy 'strem', did you mean 'stream'? allowed: class, h2o, none, opt, random, snapkv, "
                "stream, tova, or module:function"
            ),
        ),
        (
            "Stream:sink=4,recent=8",
            (
                "unknown policy 'Stream', did you mean 'stream'? allowed: class, h2o, none, opt, random, snapkv, "
                "stream, tova, or module:function"
            ),
        ),
        ("opt", "opt needs budget=; allowed: block, budget, every, grace, heads, hole, layers, "),
        (
            "user",
            "unknown policy 'user'; allowed: class, h2o, none, opt, random, snapkv, stream, tova, or module:function",
        ),
        ("nopkg.mod:keep,budget=9", "policy 'nopkg.mod:keep': no module 'nopkg'; put its folder on PYTHONPATH"),
        ("json:nothing,budget=9", "policy 'json:nothing': module 'json' has no function 'nothing'"),
        (
            "x:json:loads,budgt=9",
            (
                "unknown option of json:loads 'budgt', did you mean 'budget'? allowed: block, budget, every, heads, "
                "hole, layers, norm, pool, positions, recent, scores, sink, window"
            ),
        ),
        (
            "h2o:json:loads,budget=9",
            (
                "h2o takes no function (json:loads); allowed: block, budget, every, grace, heads, "
                "hole, layers, norm, positions, recent, sink, split"
            ),
        ),
        (
            "random:budget=64",
            "random needs seed=; allowed: block, budget, every, grace, hole, positions, recent, seed, sink, split",
        ),
        (
            "snapkv:budget=64,pool=4",
            "policy snapkv:budget=64,pool=4: pool=4 must be odd, so that a token is its middle",
        ),
        (
            "snapkv:budget=64,window=16,recent=8",
            (
                "policy snapkv:budget=64,recent=8,window=16: recent 8 is smaller than window 16, whose tokens ask and "
                "are never evicted; raise recent, lower window or leave recent out"
            ),
        ),
        (
            "snapkv:budget=64,window=16,queries=probe",
            (
                "policy snapkv:budget=64,window=16,queries=probe: window= has no meaning beside queries=probe; "
                "leave it out"
            ),
        ),
        ("snapkv:budget=32", "policy snapkv:budget=32: budget 32 is smaller than sink + recent + 1 (0 + 32 + 1)"),
        ("tova:budget=64,layers=3-1", "layers=3-1: '3-1' is not understood; write all, late, 17-23, 7+14+21 or 0-3+17"),
        ("tova:budget=64,layers=1++2", "layers=1++2: '' is not understood; write all, late, 17-23, 7+14+21 or 0-3+17"),
        ("tova:budget=64,layers=1-4+3", "layers=1-4+3: a layer is named twice"),
        ("stream", "stream needs sink= and recent=; allowed: block, every, hole, positions, recent, sink, split"),
        ("stream:sink=4", "stream needs recent=; allowed: block, every, hole, positions, recent, sink, split"),
        ("stream:sink=4,recent=0", "stream:recent=0: '0' is not allowed; allowed: a whole number of at least 1"),
        ("stream:sink=-1,recent=8", "stream:sink=-1: '-1' is not allowed; allowed: a whole number of at least 0"),
        (
            "stream:sink=4,recent=8,budget=64",
            ("unknown option of stream 'budget'; allowed: block, every, hole, positions, recent, sink, split"),
        ),
        (
            "stream:sink=4,recent=8,position=gap",
            (
                "unknown option of stream 'position', did you mean 'positions'? "
                "allowed: block, every, hole, positions, recent, sink, split"
            ),
        ),
        ("stream:sink=4,recent=8,every=0", "stream:every=0: '0' is not allowed; allowed: a whole number of at least 1"),
        ("stream:sink=4,recent=8,block=0", "stream:block=0: '0' is not allowed; allowed: a whole number of at least 1"),
        ("stream:sink=4,recent=8,hole=skip", "stream:hole=skip: unknown value 'skip'; allowed: forget, refill"),
        ("stream:sink=4,recent=8,split=true", "stream:split=true: 'true' is not understood; allowed: yes, no, on, off"),
        ("none:sink=4", "unknown option of none 'sink'; allowed: block, every, hole, positions"),
        ("class", "class needs budget=; allowed: block, budget, every, hole, positions, recent, sink, split"),
        ("class:budget=0", "class:budget=0: '0' is not allowed; allowed: a whole number of at least 1"),
        (
            "class:budget=64,sink=40,recent=24",
            (
                "policy class:budget=64,sink=40,recent=24: budget 64 is smaller than "
                "sink + recent + 1 (40 + 24 + 1); raise the budget or lower sink and recent"
            ),
        ),
    ],
)
def test_a_policy_error_lists_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_policy(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "values",
    [
        {"name": "stream", "recent": 0},
        {"name": "stream", "sink": 4, "recent": 8, "budget": 64},
        {"name": "none", "sink": 4},
        {"name": "none", "split": True},
        {"name": "class"},
        {"name": "class", "budget": 0},
        {"name": "class", "budget": -3},
        {"name": "class", "budget": 64, "every": 0},
        {"name": "class", "budget": 64, "positions": "exact"},
        {"name": "h2o", "recent": 8},
        {"name": "h2o", "budget": 64, "recent": 8, "seed": 3},
        {"name": "h2o", "budget": 64, "recent": 8, "function": "json:loads"},
        {"name": "user", "budget": 64},
        {"name": "user", "budget": 64, "function": "loads"},
        {"name": "tova", "budget": 64, "layers": "few"},
        {"name": "random", "budget": 64},
    ],
)
def test_a_policy_built_in_code_is_held_to_the_same_rules(values: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        PolicySpec(**values)


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("none", None),
        ("stream:sink=4,recent=8", None),
        ("class:budget=64", None),
        ("random:budget=64,seed=0", None),
        ("json:loads,budget=64", None),
        ("h2o:budget=64,recent=8", ScoreRequest("accumulated")),
        ("snapkv:budget=64,window=9,layers=17-19", ScoreRequest("window", 9, (17, 18, 19))),
        ("snapkv:budget=64,queries=probe,heads=max", ScoreRequest("probe", None, None, "max", late=True)),
        ("tova:budget=64,layers=all", ScoreRequest("window", 1)),
        ("tova:budget=64,layers=7+14", ScoreRequest("window", 1, (7, 14))),
        ("json:loads,budget=64,scores=window,window=5", ScoreRequest("window", 5)),
    ],
)
def test_what_a_policy_wants_measured(text: str, request_: ScoreRequest | None) -> None:
    assert parse_policy(text).score_request == request_


def test_the_limit_is_the_smaller_of_context_and_budget() -> None:
    assert parse_policy("stream:sink=4,recent=8").limit(1024) == 1024
    assert parse_policy("class:budget=64").limit(1024) == 64
    assert parse_policy("class:budget=2048").limit(1024) == 1024
    assert parse_policy("none").limit(1024) == 1024


def test_a_context_must_hold_the_spans_and_one_more() -> None:
    parse_policy("stream:sink=4,recent=508").check_context(513)
    parse_policy("none").check_context(2)
    with pytest.raises(SpecError) as caught:
        parse_policy("stream:sink=4,recent=508").check_context(512)
    assert str(caught.value) == (
        "policy stream:sink=4,recent=508 needs a context of at least 513 tokens (sink 4 + recent 508 + 1), "
        "this one has 512; raise the context or lower recent"
    )


def test_none_never_plans() -> None:
    policy = parse_policy("none")
    assert not policy.evicts
    assert policy.plan(ones(9), budget=1, capabilities=SURGERY) is None


def test_stream_frees_down_to_its_spans() -> None:
    found = parse_policy("stream:sink=2,recent=3").plan(ones(20), budget=19, capabilities=SURGERY)
    assert found is not None
    assert found.keep == (Range(0, 2), Range(17, 20))


def test_stream_splits_and_class_does_not() -> None:
    blocks = [Block(0, 0, 32, "user", CacheClass.VOLATILE), Block(1, 32, 64, "user", CacheClass.VOLATILE)]
    stream = parse_policy("stream:sink=4,recent=40").plan(blocks, budget=60, capabilities=SURGERY)
    whole = parse_policy("stream:sink=4,recent=40,split=no").plan(blocks, budget=60, capabilities=SURGERY)
    by_class = parse_policy("class:budget=60").plan(blocks, budget=60, capabilities=SURGERY)
    assert stream is not None
    assert whole is not None
    assert by_class is not None
    assert stream.keep == (Range(0, 4), Range(24, 64))
    assert whole.evict == ()
    assert by_class.keep == (Range(32, 64),)


@pytest.mark.parametrize("text", ["stream:sink=0,recent=1", "class:budget=2"])
def test_the_last_resident_token_is_never_evicted(text: str) -> None:
    for n in range(1, 6):
        # By recency alone the last token would be the first to go.
        blocks = [replace(b, last_used=n - b.start) for b in ones(n)]
        found = parse_policy(text).plan(blocks, budget=1, capabilities=SURGERY)
        assert found is not None
        assert found.keep == (Range(n - 1, n),)


def test_positions_narrow_the_ways() -> None:
    gap_only = Capabilities(remove_middle=True)
    rebased = parse_policy("stream:sink=0,recent=1,positions=rebased")
    assert rebased.ways(SURGERY) == (Way.REBASED,)
    assert rebased.ways(gap_only) == ()
    assert parse_policy("stream:sink=0,recent=1").ways(gap_only) == (Way.GAP,)
    found = rebased.plan(ones(4), budget=2, capabilities=gap_only)
    assert found is not None
    assert (found.evict, found.diagnostics) == ((), ("stream_unsupported", "over_budget"))
    recompute = Capabilities(recompute_range=True)
    allowed = rebased.plan(ones(4), budget=2, capabilities=recompute, allow_recompute=True)
    assert allowed is not None
    assert allowed.keep == (Range(3, 4),)
