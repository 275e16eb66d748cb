"""Several proposed tokens in one engine call: where it is refused, and what the engines' own numbers are then."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

import numpy as np
import pytest

from kvtape.backends.errors import Cancelled, EngineFault, FatalClass, UnsupportedOperation
from kvtape.backends.isolated.opened import Opened
from kvtape.backends.llama.decoder import Decoder
from kvtape.backends.llama.session import LlamaBackend
from kvtape.backends.protocol import Backend, Logits, SessionConfig
from kvtape.backends.verifying import Verifier, as_verifier
from kvtape.testing import drafting
from kvtape.testing.bench import NotApplicable
from kvtape.testing.conformance import CONFORMANCE_CONFIG, Laboratory, Scenario
from support import conformance_backends, llama_tiny

pytestmark = pytest.mark.contract("I7")


def flash(config: SessionConfig) -> Backend:
    return conformance_backends.llama(dataclasses.replace(config, flash_attention="on"))


def greedy(logits: Logits) -> int:
    return int(logits.argmax())


@pytest.mark.parametrize("run", [drafting.verify, drafting.verify_undone], ids=lambda f: f.__name__)
def test_llama_verifies_with_flash_attention(run) -> None:  # type: ignore[no-untyped-def]
    try:
        Laboratory(flash).run(Scenario(run.__name__, run))
    except NotApplicable as err:
        pytest.fail(str(err))


class Seen:
    """Keeps what it is shown, and answers."""

    def __init__(self) -> None:
        self.rows: list[Logits] = []

    def choose(self, logits: Logits) -> int:
        self.rows.append(logits.copy())
        return greedy(logits)

    def keep(self, each: Logits) -> int:
        self.rows += [row.copy() for row in each]
        return len(each)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
def test_llama_gives_the_numbers_of_single_calls_of_quantised_weights_to_the_bit(kv_type: str) -> None:
    together, difference = both_ways({"kv_type_k": kv_type, "kv_type_v": kv_type}, weights="q8_0")
    assert difference == 0
    assert together.verify_margin == 0
    together.close()


def test_llama_says_how_near_a_choice_may_be_where_weights_are_not_quantised() -> None:
    together, difference = both_ways({"kv_type_k": "f32", "kv_type_v": "f32"})
    assert 0 < difference < together.verify_margin / 100
    together.close()


def both_ways(config: dict[str, object], **shape: object) -> tuple[LlamaBackend, float]:
    """13 tokens one by one and in calls of several: how much logits and rows differ at most."""
    config = {"n_ctx": 256, "chunk": 64, "flash_attention": "on", "uncertified": True} | config
    alone, together = (llama_tiny.session(config=config, **shape) for _ in range(2))
    ids, one, other, at = llama_tiny.tokens(40), Seen(), Seen(), 0
    logits = alone.prefill(ids, 0).logits
    together.prefill(ids, 0)
    run = alone.decode_until(13, 256, 40, logits, one.choose)
    for n in (2, 1, 7, 3):
        together.verify(run.tokens[at : at + n], 40 + at, other.keep)
        at += n
    pairs = list(zip([*one.rows[1:], run.logits], other.rows, strict=True))
    pairs += zip(alone.witness().rows.keys, together.witness().rows.keys, strict=True)
    alone.close()
    return together, max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in pairs)


REFUSED = {
    "no flash attention": (lambda: llama_tiny.session(config={"n_ctx": 256}), "without flash attention"),
    "threads that share": (
        lambda: llama_tiny.session(config={"n_ctx": 512, "flash_attention": "on", "threads": 2}),
        "several threads share",
    ),
    "a window": (
        lambda: llama_tiny.session("gemma3", config={"n_ctx": 256, "flash_attention": "on"}),
        "a windowed cache writes rejected rows over",
    ),
    "a recurrent memory": (
        lambda: llama_tiny.session("mamba", config={"n_ctx": 256, "flash_attention": "on"}),
        "remove_tail is false",
    ),
    "no host copy": (
        lambda: conformance_backends.openvino_without_mirror(CONFORMANCE_CONFIG),
        "remove_tail is false",
    ),
    "rounded rows": (lambda: conformance_backends.openvino_u8(CONFORMANCE_CONFIG), "rows that are rounded"),
    "a KV engine": (lambda: conformance_backends.reference_markov_rs(CONFORMANCE_CONFIG), "remove_tail is false"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_the_reason(name: str) -> None:
    make, why = REFUSED[name]
    backend: Backend = make()
    backend.prefill(llama_tiny.tokens(6), 0)
    assert isinstance(backend, Verifier)
    found = as_verifier(backend)
    assert isinstance(found, str)
    assert why in found
    with pytest.raises(UnsupportedOperation, match=why):
        backend.verify([5, 6], 6, lambda each: len(each))
    assert sum(s.length for s in backend.books()) == 6
    backend.close()


def test_a_refusal_that_needs_no_measuring_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host asks this of every session that it opens."""
    backend = llama_tiny.session(config={"n_ctx": 256})

    def computing(*_: object) -> NoReturn:
        pytest.fail("tokens were computed")

    monkeypatch.setattr(Decoder, "run", computing)
    monkeypatch.setattr(Decoder, "run_each", computing)
    opened = Opened.of(backend)
    assert "without flash attention" in (opened.verify_refusal or "")
    assert opened.verify_margin == 0
    backend.close()


def test_a_backend_without_the_operation_says_so() -> None:
    class Plain:
        name = "mine"

    assert as_verifier(Plain()) == "mine has no operation that looks at several proposed tokens in one call"  # type: ignore[arg-type]


OPENS = {
    "llama": lambda: flash(CONFORMANCE_CONFIG),
    "openvino": lambda: conformance_backends.openvino(CONFORMANCE_CONFIG),
    "reference": lambda: conformance_backends.reference(CONFORMANCE_CONFIG),
}


@pytest.mark.parametrize("name", OPENS)
def test_a_failing_engine_is_final_and_a_cancel_is_not(name: str) -> None:
    backend = OPENS[name]()
    backend.prefill(llama_tiny.tokens(6), 0)
    assert isinstance(backend, Verifier)

    def cancelling(each: Logits) -> int:
        backend.cancel()
        return 1

    assert backend.verify([5, 6, 7], 6, cancelling).kept == 1  # it came too late for this call, the next one has it
    with pytest.raises(Cancelled):
        backend.verify([6, 7], 7, lambda each: len(each))
    assert sum(s.length for s in backend.books()) == 7
    backend.abort_next()  # type: ignore[attr-defined]
    with pytest.raises(EngineFault) as caught:
        backend.verify([6, 7], 7, lambda each: len(each))
    assert caught.value.fatal_class is FatalClass.DECODE_FAILED
    with pytest.raises(EngineFault):
        backend.verify([6, 7], 7, lambda each: len(each))
    backend.close()
