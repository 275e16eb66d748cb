"""An engine in a host process is the engine: results, refusals, choices, cancels and ends as in one process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import Cancelled, InputRejected, KvtapeError, SessionClosed, UsageError
from kvtape.backends.isolated.backend import OPERATIONS, IsolatedBackend
from kvtape.backends.isolated.engine import HostKeeper, open_isolated
from kvtape.backends.isolated.process import Limits
from kvtape.backends.protocol import Backend, SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.backends.session import Session
from kvtape.backends.verifying import Verifier
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.ranges import RangeSet
from kvtape.planner.specs import parse_policy
from kvtape.testing.conformance import SCENARIOS, Laboratory, NotApplicable, Scenario
from kvtape.testing.sink import ListSink
from support import conformance_backends, llama_tiny, openvino_tiny
from support.isolated import (
    awaits_an_answer,
    children,
    engine,
    interrupted_in_a_call,
    isolated_llama,
    model_file,
    session,
    until,
)
from support.llama_tiny import tokens

CONFIG = SessionConfig(n_ctx=512, chunk=16, kv_type_k="f32", kv_type_v="f32", cold_budget_tokens=256)
LABORATORY = Laboratory(isolated_llama)


def greedy(logits: Any) -> int:
    return int(logits.argmax())


def in_process(name: str) -> Backend:
    where = llama_tiny.engine() if name == "llama" else openvino_tiny.tiny_engine("llama")
    return where.open(CONFIG)


@contextlib.contextmanager
def both(name: str) -> Iterator[tuple[Backend, IsolatedBackend]]:
    here, there = in_process(name), engine(name).open(CONFIG)
    yield here, there
    here.close()
    there.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_an_engine_in_a_host_conforms(scenario: Scenario) -> None:
    try:
        LABORATORY.run(scenario)
    except NotApplicable as err:
        with pytest.raises(NotApplicable, match=re.escape(str(err))):
            Laboratory(conformance_backends.llama).run(scenario)


@pytest.mark.parametrize("name", ["llama", "openvino"])
def test_a_session_in_a_host_is_the_session_to_the_bit(name: str) -> None:
    with both(name) as (here, there):
        for attribute in ("name", "engine_version", "facts", "config", "n_ctx", "capabilities"):
            assert getattr(here, attribute) == getattr(there, attribute)
        results = [play(backend) for backend in (here, there)]
    for one, other in zip(*results, strict=True):
        assert type(one) is type(other)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other


def play(backend: Backend) -> list[Any]:
    """Everything that the protocol has, and what it gave."""
    first = backend.prefill(tokens(60), 0)
    run = backend.decode_until(10, 512, 60, first.logits, greedy)
    out = [first.logits, first.calls, run.tokens, run.logits, run.stopped]
    saved = backend.snapshot()
    block = backend.export_block(20, 30)
    backend.evict(20, 30)
    backend.shift(30, 70, -10)
    out += [backend.books(), backend.kv_bytes()]
    backend.shift(20, 60, 10)
    backend.admit(block, 20, 20)
    backend.evict(5, 9)
    refilled = backend.refill(tokens(60)[5:9], 5, 5)
    out += [refilled.logits, refilled.tokens, backend.books()]
    backend.truncate(40)
    seen = backend.witness()
    out += [seen.cache_positions, seen.positions_from, *seen.rows.keys, *seen.rows.values]
    if seen.mirror is not None:
        out += [*seen.mirror.keys]
    backend.restore(saved)
    rebuilt = backend.rebuild(RangeSet([(0, 4), (50, 60)]), [*tokens(60)[:4], *tokens(60)[50:]])
    return [*out, rebuilt.logits, backend.books(), block, saved]


def test_scores_come_out_of_a_host() -> None:
    options = {"scores": "on"}
    here, there = llama_tiny.session(config={"options": options}), session(options=options)
    for backend in (here, there):
        backend.prefill(tokens(30), 0)
    for take in (
        lambda b: b.take_mass(),
        lambda b: b.score(tokens(5, 1), 30),
        lambda b: b.score(tokens(5, 1), 30, [1]),
    ):
        one, other = take(here), take(there)
        assert (one.layers, one.n_queries) == (other.layers, other.n_queries)
        for a, b in ((one.tape_positions, other.tape_positions), (one.mass, other.mass), (one.peak, other.peak)):
            np.testing.assert_array_equal(a, b)
    there.close()


def test_every_operation_of_the_protocol_is_served() -> None:
    asked = {n for p in (Backend, Verifier) for n in vars(p) if not n.startswith("_") and callable(getattr(p, n))}
    # A refusal to verify comes with what was opened.
    assert (asked - {"cancel", "close", "verify_refusal"}) | {"abort_next"} == OPERATIONS


REFUSED: dict[str, Callable[[Backend], object]] = {
    "no tokens": lambda b: b.prefill([], 20),
    "a token outside": lambda b: b.prefill([4, 320], 20),
    "a huge token": lambda b: b.prefill([2**70], 20),
    "a float": lambda b: b.prefill([1.5], 20),  # type: ignore[list-item]
    "a text": lambda b: b.prefill("abc", 20),  # type: ignore[arg-type]
    "a number too wide": lambda b: b.prefill([np.uint64(2**63)], 20),  # type: ignore[list-item]
    "an array": lambda b: b.prefill(np.ones((2, 2), np.int64), 20),  # type: ignore[arg-type]
    "absent rows": lambda b: b.evict(5, 99),
    "too many": lambda b: b.prefill([5] * 600, 20),
    "not enough": lambda b: b.rebuild(RangeSet([(0, 3)]), [1]),
    "a damaged block": lambda b: b.admit(b"nonsense", 3, 3),
    "a damaged state": lambda b: b.restore(b""),
    "an unknown flag": lambda b: b.refusal("telepathy"),
    "no scores": lambda b: b.take_mass(),
    "a bad choice": lambda b: b.decode_until(4, 512, 20, np.zeros(320, np.float32), lambda _: -7),
    "no number": lambda b: b.decode_until(4, 512, 20, np.zeros(320, np.float32), lambda _: "five"),  # type: ignore[arg-type,return-value]
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("name", ["llama", "openvino"])
def test_refusals_are_the_same_error_with_the_same_words(name: str, what: str) -> None:
    with both(name) as (here, there):
        caught = []
        for backend in (here, there):
            backend.prefill(tokens(20), 0)
            with pytest.raises(Exception) as info:
                REFUSED[what](backend)
            fields = {k: v for k, v in vars(info.value).items() if k != "__notes__"}
            caught.append((type(info.value), str(info.value), fields))
            assert sum(s.length for s in backend.books()) == 20
        assert caught[0] == caught[1]


def test_what_cannot_be_sent_is_refused_before_the_host_hears_of_it() -> None:
    backend = session()
    with pytest.raises(InputRejected, match="another process"):
        backend.prefill([object()], 0)  # type: ignore[list-item]
    logits = backend.prefill(tokens(5), 0).logits
    with pytest.raises(InputRejected, match="another process"):
        backend.decode_until(3, 512, 5, logits, lambda _: object())  # type: ignore[arg-type,return-value]
    assert sum(s.length for s in backend.books()) == 5
    backend.close()


LOADS: dict[str, tuple[Any, ...]] = {
    "unknown engine": ("lama", "model.gguf"),
    "no file": ("llama", "nowhere/model.gguf"),
    "an option": ("llama", None, {"speed": "max"}),
    "not built": ("reference", "model.gguf"),
}


@pytest.mark.parametrize("what", LOADS)
def test_loading_is_refused_as_in_one_process(what: str) -> None:
    name, path, *rest = LOADS[what]
    path = path or model_file("llama")
    before = children()
    caught = []
    for opener in (open_engine, open_isolated):
        with pytest.raises(KvtapeError) as info:
            opener(name, path, *rest)  # type: ignore[operator]
        caught.append((type(info.value), str(info.value)))
    assert caught[0] == caught[1]
    assert children() == before


def test_text_and_tokens_are_the_engines_own() -> None:
    text = "Déjà vu: a cache.\n"
    ids = engine().tokenize(text)
    assert ids == llama_tiny.engine().tokenize(text)
    assert engine().detokenize(ids) == llama_tiny.engine().detokenize(ids)
    with pytest.raises(InputRejected, match="Unicode"):
        engine().tokenize("\ud800")


# -- choices ----------------------------------------------------------------------------------------------------------


class Unexpected(Exception):
    pass


@pytest.mark.parametrize("error", [Unexpected("no"), KeyboardInterrupt(), OSError("disk"), EOFError(), SystemExit(3)])
def test_what_a_choice_raises_comes_out_itself_and_the_run_is_taken_back(error: BaseException) -> None:
    backend = session()
    logits = backend.prefill(tokens(10), 0).logits
    asked = []

    def choose(row: Any) -> int:
        asked.append(row)
        if len(asked) == 4:
            raise error
        return 7

    with pytest.raises(type(error)) as info:
        backend.decode_until(9, 512, 10, logits, choose)
    assert info.value is error
    assert sum(s.length for s in backend.books()) == 10
    assert backend.decode_until(2, 512, 10, logits, lambda _: 5).tokens == (5, 5)
    backend.close()


def test_a_choice_may_look_at_its_session_and_use_another() -> None:
    backend, draft = session(), session()
    logits = backend.prefill(tokens(10), 0).logits
    draft.prefill(tokens(10), 0)
    seen = []

    def choose(row: Any) -> int:
        seen.append((backend.kv_bytes()["resident"] > 0, len(draft.prefill([9], 10 + len(seen)).logits)))
        return greedy(row)

    run = backend.decode_until(4, 512, 10, logits, choose)
    assert run.tokens == llama_decoded(4)
    assert seen == [(True, 320)] * 4
    backend.close()
    draft.close()


def llama_decoded(n: int) -> tuple[int, ...]:
    backend, computed = llama_tiny.prefilled(10)
    return backend.decode_until(n, 512, 10, computed.logits, greedy).tokens


def test_no_choice_ends_a_run() -> None:
    backend = session()
    logits = backend.prefill(tokens(10), 0).logits
    given = iter([5, 6, None])
    run = backend.decode_until(9, 512, 10, logits, lambda _: next(given))
    assert (run.tokens, run.stopped) == ((5, 6), "chosen_none")
    backend.close()


# -- cancels and interrupts -------------------------------------------------------------------------------------------


def test_a_cancel_stops_the_next_operation_whatever_the_threads_do() -> None:
    one, other = session(), session()
    other.prefill(tokens(10), 0)
    for i in range(40):
        one.cancel()
        with pytest.raises(Cancelled):
            one.prefill(tokens(10), 0)
        if i % 10 == 0:
            other.prefill(tokens(5), 10 + i)
    one.prefill(tokens(10), 0)
    for backend in (one, other):
        backend.close()


def test_a_cancel_from_another_thread_stops_a_running_operation() -> None:
    """A prefill of single tokens: thousands of engine calls, far longer than the wait."""
    backend = session(n_ctx=8192, chunk=1)
    main = threading.get_ident()
    other = threading.Thread(target=lambda: (until(lambda: awaits_an_answer(main)), backend.cancel()))
    other.start()
    with pytest.raises(Cancelled):
        backend.prefill(tokens(8000), 0)
    other.join()
    assert backend.books() == ()
    backend.prefill(tokens(8), 0)
    backend.close()


def test_ctrl_c_in_a_call_leaves_host_and_other_sessions_alone() -> None:
    backend, other = session(n_ctx=8192, chunk=1), session()
    pid = engine().host_pid
    with pytest.raises(KeyboardInterrupt), interrupted_in_a_call():
        backend.prefill(tokens(8000), 0)
    with pytest.raises(SessionClosed, match="interrupted"):
        backend.books()
    other.prefill(tokens(10), 0)
    backend.close()
    assert backend._channel._cancels == 1  # not waited for
    assert engine().host_pid == pid
    other.prefill(tokens(10), 10)
    other.close()


def test_a_ctrl_c_of_the_terminal_does_not_reach_the_host() -> None:
    pid = engine().host_pid
    assert pid is not None
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGINT)  # and one that is sent to it is not heard
    backend = session()
    backend.prefill(tokens(10), 0)
    backend.close()
    assert engine().host_pid == pid


def test_close_waits_for_a_call_of_another_thread_and_stops_it() -> None:
    backend = session(n_ctx=8192, chunk=1)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            backend.prefill(tokens(8000), 0)
        except KvtapeError as err:
            caught.append(err)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: awaits_an_answer(thread.ident))
    backend.close()
    thread.join()
    assert [type(e) for e in caught] == [Cancelled]


def test_close_from_inside_a_choice_ends_the_call() -> None:
    backend = session()
    logits = backend.prefill(tokens(10), 0).logits

    def choose(_: Any) -> int:
        backend.close()
        return 5

    with pytest.raises(SessionClosed):
        backend.decode_until(3, 512, 10, logits, choose)
    again = session()
    again.prefill(tokens(3), 0)
    again.close()


# -- several ----------------------------------------------------------------------------------------------------------


def test_a_warm_host_serves_engines_one_after_the_other_and_side_by_side() -> None:
    keeper = HostKeeper()
    before = children()
    one = open_isolated("llama", model_file("llama"), keeper=keeper)
    pid = keeper.pid
    other = open_isolated("openvino", model_file("openvino"), keeper=keeper)
    for host in (one, other):
        backend = session(host)
        backend.prefill(tokens(10), 0)
        backend.close()
    one.close()
    again = open_isolated("llama", llama_tiny.model_file("qwen2"), keeper=keeper)
    assert session(again).prefill(tokens(10), 0).tokens == 10
    assert session(other).prefill(tokens(10), 0).tokens == 10
    with pytest.raises(SessionClosed):
        one.open(CONFIG)
    assert (keeper.pid, keeper.started) == (pid, 1)
    again.close()
    keeper.close()
    other.close()
    assert children() == before
    with pytest.raises(SessionClosed):
        open_isolated("llama", model_file("llama"), keeper=keeper)


def test_limits_belong_to_the_keeper() -> None:
    with pytest.raises(UsageError, match="keeper"):
        open_isolated("llama", model_file("llama"), keeper=HostKeeper(), limits=Limits())


def test_sessions_in_threads_do_not_wait_for_each_other() -> None:
    """One is stopped in its choice while the others compute."""
    held, release = threading.Event(), threading.Event()
    slow = session()
    logits = slow.prefill(tokens(10), 0).logits

    def choose(_: Any) -> int:
        held.set()
        release.wait(120)
        return 5

    thread = threading.Thread(target=lambda: slow.decode_until(1, 512, 10, logits, choose))
    thread.start()
    assert held.wait(120)
    results: list[int] = []
    workers = [threading.Thread(target=lambda s=i: results.append(work(s))) for i in range(3)]  # type: ignore[misc]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(results) == [20, 21, 22]
    release.set()
    thread.join()
    assert sum(s.length for s in slow.books()) == 11
    slow.close()


def work(seed: int) -> int:
    backend = session()
    backend.prefill(tokens(20 + seed, seed), 0)
    n = sum(s.length for s in backend.books())
    backend.close()
    return n


def test_engines_of_ones_own_run_in_a_host() -> None:
    toy = open_isolated("toy", "none", loader="support.rigged_engines:load_toy")
    backend = toy.open(SessionConfig(n_ctx=64))
    assert backend.capabilities == Capabilities(
        remove_tail=True, remove_middle=True, position_shift=True, recompute_range=True, snapshot_state=True
    )
    with pytest.raises(LookupError, match="no vocabulary"):
        toy.tokenize("a")
    with pytest.raises(RuntimeError, match="_OddError: odd"):
        toy.detokenize([1])
    with Session(
        backend, parse_policy("stream:sink=2,recent=20"), ListSink(), ManualClock(), run_id="r", session_id="s"
    ) as running:
        running.ensure_prefix([t % 64 for t in tokens(50)])
        running.decode(5)
        assert len(running.tape) == 55
    toy.close()
