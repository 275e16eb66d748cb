"""The conformance suite on the toy and on both engines; and on wrong toys, where it must fail for the right reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from kvtape.backends.errors import UsageError
from kvtape.backends.protocol import Backend, SessionConfig
from kvtape.backends.verifying import Verifier
from kvtape.planner.capabilities import Capabilities
from kvtape.testing.conformance import (
    CONFORMANCE_CONFIG,
    SCENARIOS,
    Laboratory,
    NotApplicable,
    NotConforming,
    Scenario,
    load_factory,
)
from kvtape.testing.toy import TOY_CAPABILITIES, ToyBackend, open_toy
from support import conformance_backends
from support.wrong_toys import WRONG_TOYS, factory_of

FACTORIES: dict[str, Callable[[SessionConfig], Backend]] = {
    "toy": open_toy,
    "llama": conformance_backends.llama,
    "llama_q8_0": conformance_backends.llama_q8_0,
    "openvino": conformance_backends.openvino,
    "openvino_without_mirror": conformance_backends.openvino_without_mirror,
    "openvino_u8": conformance_backends.openvino_u8,
    "openvino_bf16": conformance_backends.openvino_bf16,
    "openvino_ir": conformance_backends.openvino_ir,
    "reference": conformance_backends.reference,
    "reference_markov_rs": conformance_backends.reference_markov_rs,
}
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@cache
def laboratory(name: str) -> Laboratory:
    return Laboratory(FACTORIES[name])


@cache
def why_not(backend: str, scenario: Scenario) -> str | None:
    """Runs it, once; why it does not apply, or None where it does and passes."""
    try:
        laboratory(backend).run(scenario)
    except NotApplicable as err:
        return str(err)
    return None


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
@pytest.mark.parametrize("backend", FACTORIES)
def test_backend_conforms(backend: str, scenario: Scenario) -> None:
    why = why_not(backend, scenario)
    if why is not None:
        assert_not_applicable(FACTORIES[backend], why)


def assert_not_applicable(factory: Callable[[SessionConfig], Backend], why: str) -> None:
    """The reason a scenario gives for not running is so: a flag has that state, or options are refused."""
    flags = [f.name for f in dataclasses.fields(Capabilities)]
    flag = next((f for f in flags if why.startswith(f"{f} is ")), None)
    if flag is not None:
        opened = factory(CONFORMANCE_CONFIG)
        assert getattr(opened.capabilities, flag) is why.startswith(f"{flag} is true")
        opened.close()
        return
    if why.startswith("the backend refuses drafts here: "):
        opened = factory(CONFORMANCE_CONFIG)
        assert isinstance(opened, Verifier)
        assert opened.verify_refusal() == why.partition(": ")[2]
        opened.close()
        return
    assert why.startswith("options {'scores': 'on'} are refused")
    with pytest.raises(UsageError):
        factory(dataclasses.replace(CONFORMANCE_CONFIG, options={"scores": "on"}))


DRAFTS = {"verify", "verify_undone"}


@pytest.mark.parametrize(
    ("backend", "refused"),
    # llama.cpp looks at drafts under flash attention alone.
    [("toy", set()), ("llama", DRAFTS), ("openvino", set()), ("reference", set())],
    ids=["toy", "llama", "openvino", "reference"],
)
def test_only_false_flags_are_skipped_where_everything_can_be_done(backend: str, refused: set[str]) -> None:
    """A suite that skips what it should ask would pass on anything."""
    skipped = {scenario.name for scenario in SCENARIOS if why_not(backend, scenario) is not None}
    flags = {f.name for f in dataclasses.fields(Capabilities)}
    false_by_configuration = {"attention_scores", "sparse_attention", "sliding_window_attention_tokens"}
    assert skipped == refused | {f"without_{flag}" for flag in flags - false_by_configuration}


@pytest.mark.parametrize("flag", [n for n in BY_NAME if n.startswith("without_")])
def test_a_toy_without_an_ability_still_conforms(flag: str) -> None:
    lacking = dataclasses.replace(TOY_CAPABILITIES, **{flag.removeprefix("without_"): False})
    lab = Laboratory(lambda config: ToyBackend(config, lacking))
    lab.run(BY_NAME[flag])
    for scenario in SCENARIOS:
        try:
            lab.run(scenario)
        except NotApplicable:
            continue


@pytest.mark.parametrize("kind", WRONG_TOYS, ids=lambda k: k.__name__)
def test_a_wrong_backend_fails_for_the_right_reason(kind: type[ToyBackend]) -> None:
    scenario, pattern = WRONG_TOYS[kind]
    lab = Laboratory(factory_of(kind))
    with pytest.raises(NotConforming, match=pattern):
        lab.run(BY_NAME[scenario])
    # What has nothing to do with the fault passes all the same.
    lab.run(BY_NAME["prefill"])
    lab.run(BY_NAME["decode"])
    assert first_failure(lab) == scenario


def first_failure(lab: Laboratory) -> str | None:
    for scenario in SCENARIOS:
        try:
            lab.run(scenario)
        except NotApplicable:
            continue
        except NotConforming:
            return scenario.name
    return None


def test_every_scenario_says_what_must_hold() -> None:
    assert len({s.name for s in SCENARIOS}) == len(SCENARIOS)
    assert all(s.what.endswith(".") for s in SCENARIOS)


def test_every_capability_has_scenarios_for_true_and_for_false() -> None:
    flags = {f.name for f in dataclasses.fields(Capabilities)} - {"sparse_attention", "sliding_window_attention_tokens"}
    assert {flag for s in SCENARIOS for flag in s.needs} == flags
    assert {n.removeprefix("without_") for n in BY_NAME if n.startswith("without_")} == flags


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("toy", "write it as module:factory"),
        ("no_such_module_here:open", "is it on the Python path"),
        ("./toy.py:open_toy", "write it as module:factory"),
        (".toy:open_toy", "write it as module:factory"),
        ("kvtape.testing.toy:missing", "has no missing"),
        ("kvtape.testing.toy:__all__", "is not callable"),
    ],
)
def test_a_factory_that_is_not_there_is_a_usage_error(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        load_factory(text)


def test_a_module_that_fails_while_it_is_imported_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_backend.py").write_text("raise RuntimeError('no licence')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="importing broken_backend failed: RuntimeError: no licence"):
        load_factory("broken_backend:open")


def test_a_factory_that_returns_no_backend_does_not_conform() -> None:
    with pytest.raises(NotConforming, match=r"the factory returned None: an open protocol.Backend has `capabilities`"):
        Laboratory(lambda config: None).run(BY_NAME["open_empty"])  # type: ignore[arg-type,return-value]


def test_a_factory_that_refuses_the_configuration_does_not_conform() -> None:
    def refuses(config: SessionConfig) -> Backend:
        raise UsageError("n_ctx is too small")

    with pytest.raises(NotConforming, match="n_ctx is too small"):
        Laboratory(refuses).run(BY_NAME["open_empty"])
    with pytest.raises(NotApplicable, match="n_ctx is too small"):
        Laboratory(refuses).run(BY_NAME["take_mass"])
    assert CONFORMANCE_CONFIG.chunk < CONFORMANCE_CONFIG.n_ctx
