"""What a capture does when something is wrong: with the recorder, with the engine's memory, with who calls."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.errors import UnsupportedOperation
from kvtape.planner.events import Op
from kvtape.serve import capture
from kvtape.serve.taping.class_taps import tapped
from kvtape.serve.taping.errors import CaptureFailed, CaptureRefused, ConcurrentUse
from kvtape.serve.taping.guard import Guard
from kvtape.serve.taping.patching import Patches
from kvtape.traces.errors import LogExists, LogWriteFailed
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from support.captured import llama, read_back, said


def attributes(engine: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(vars(engine)), dict(vars(engine._ctx))


def clear_behind(engine: Any) -> None:
    """As somebody does who goes to the library itself."""
    import llama_cpp

    llama_cpp.llama_memory_clear(engine._ctx.memory, True)


def remove_middle_behind(engine: Any) -> None:
    import llama_cpp

    llama_cpp.llama_memory_seq_rm(engine._ctx.memory, 0, 1, 3)


def test_methods_are_what_they_were_also_when_the_block_raises(tmp_path: Path) -> None:
    with llama() as engine:
        own = lambda tokens: None  # noqa: E731 - what somebody else put there
        engine.reset = own
        before = attributes(engine)
        with pytest.raises(KeyError), capture(engine, log=tmp_path / "L"):  # noqa: PT012 - the block is the subject
            assert attributes(engine)[1] != before[1]
            engine.eval([5, 6])
            raise KeyError("of the caller")
        after = attributes(engine)
        for left, right in zip(before, after, strict=True):
            assert left.keys() == right.keys()
            assert all(left[k] is right[k] for k in left if callable(left[k]))
    assert read_back(tmp_path / "L").ops == ["open", "prompt", "prefill", "close"]


def test_a_method_that_was_wrapped_meanwhile_is_left_with_a_warning() -> None:
    class Thing:
        def ask(self) -> int:
            return 1

    thing, patches = Thing(), Patches()
    patches.put(thing, "ask", lambda original: lambda: original() + 1)
    newer = lambda: 5  # noqa: E731
    thing.ask = newer  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="ask was replaced"):
        patches.undo()
    assert thing.ask is newer
    patches.undo()


def test_a_generation_that_outlives_its_capture_goes_on_untaped(tmp_path: Path) -> None:
    with llama() as bare, llama() as engine:
        alone = bare.generate([5, 6, 7], temp=0.0)
        with capture(engine, log=tmp_path / "L"):
            steps = engine.generate([5, 6, 7], temp=0.0)
            assert [next(steps) for _ in range(3)] == [next(alone) for _ in range(3)]
        assert [next(steps) for _ in range(3)] == [next(alone) for _ in range(3)]
    assert read_back(tmp_path / "L").state.tape_length == 5


def test_a_generator_takes_tokens_that_are_sent_and_closes_as_without(tmp_path: Path) -> None:
    def talk(engine: Any) -> list[int]:
        steps = engine.generate([5, 6, 7], temp=0.0)
        told = [next(steps), steps.send([70, 71]), next(steps)]
        steps.close()
        return [*told, engine.n_tokens]

    every = {"logits_all": True}  # else the library aborts when tokens are sent
    with llama(**every) as bare, llama(**every) as engine, capture(engine, log=tmp_path / "L", check=True) as tape:
        assert talk(engine) == talk(bare)
        assert tape.error is None
    read_back(tmp_path / "L")


def test_one_engine_has_one_capture_and_two_engines_have_two(tmp_path: Path) -> None:
    with llama() as one, llama() as other:
        with capture(one, log=tmp_path / "A"), capture(other, log=tmp_path / "B"):
            with pytest.raises(CaptureRefused, match="already"), capture(one, log=tmp_path / "C"):
                pass
            one.eval([5, 6])
            other.eval([7, 8, 9])
        with capture(one, log=tmp_path / "D"):
            one.eval([5])
    assert not (tmp_path / "C").exists()
    assert [read_back(tmp_path / name).state.resident_tokens for name in "ABD"] == [2, 3, 3]


def test_what_cannot_be_captured_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with llama() as engine:
        for thing, options, error in (
            (object(), {}, CaptureRefused),
            (engine, {"on_error": "ignore"}, CaptureRefused),
            (engine, {"model": "M.gguf"}, CaptureRefused),
        ):
            with pytest.raises(error), capture(thing, log=tmp_path / "L", **options):
                pass
        (tmp_path / "there").write_bytes(b"")
        before = attributes(engine)
        with pytest.raises(LogExists), capture(engine, log=tmp_path / "there"):
            pass
        assert attributes(engine)[1] == before[1]
    with pytest.raises(UnsupportedOperation, match="closed"), capture(engine, log=tmp_path / "L"):
        pass
    assert not (tmp_path / "L").exists()


def test_a_second_thread_in_the_middle_of_a_call_is_refused_and_in_turns_it_is_not(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def other(engine: Any) -> None:
        try:
            engine.eval([9])
        except BaseException as err:
            caught.append(err)

    def in_a_thread(engine: Any) -> None:
        thread = threading.Thread(target=other, args=(engine,))
        thread.start()
        thread.join()

    with llama() as engine:
        native = engine._ctx.decode

        def slow(batch: Any) -> None:
            if not caught:
                in_a_thread(engine)
            native(batch)

        engine._ctx.decode = slow
        with capture(engine, log=tmp_path / "L", check=True) as tape:
            engine.eval([5, 6])
            in_a_thread(engine)
            assert tape.error is None
    assert [type(err) for err in caught] == [ConcurrentUse]
    assert read_back(tmp_path / "L").state.tape_length == 3


@pytest.mark.parametrize("meddle", [clear_behind, remove_middle_behind], ids=["cleared", "hole"])
def test_memory_that_changed_behind_the_capture_ends_it_once_and_aloud(tmp_path: Path, meddle: Any) -> None:
    with llama() as engine:
        with capture(engine, log=tmp_path / "L", check=True) as tape:
            engine.eval([5, 6, 7, 8])
            meddle(engine)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                engine.eval([9])
                engine.reset()
                engine.eval([5, 6])
            assert tape.error is not None
        assert [str(w.message)[:25] for w in warned] == ["kvtape stopped recording:"]
        assert engine.n_tokens == 2
    with open_log(tmp_path / "L") as log:
        run = log.default_run()
        events = log.events(run.run_id, "captured")
    assert events[-1].op is Op.LOST
    assert [str(e.op) for e in events[:3]] == ["open", "prompt", "prefill"]


def test_without_check_a_hole_behind_the_capture_is_not_seen(tmp_path: Path) -> None:
    with llama() as engine, capture(engine, log=tmp_path / "L") as tape:
        engine.eval([5, 6, 7, 8])
        remove_middle_behind(engine)
        engine.eval([9])
        assert tape.error is None


@pytest.mark.parametrize("on_error", ["raise", "stop"])
def test_a_recorder_that_fails_is_never_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: Any) -> None:
    real = Recorder.record

    def full(self: Recorder, event: Any, **rows: Any) -> None:
        if event.op is Op.DECODE:
            raise LogWriteFailed("L: writing failed (disk full)")
        real(self, event, **rows)

    with llama() as bare:
        expected = said(bare, "the cache", max_tokens=4, temperature=0.0), said(bare, "on", max_tokens=2, seed=1)
    monkeypatch.setattr(Recorder, "record", full)
    with llama() as engine, capture(engine, log=tmp_path / "L", on_error=on_error) as tape:
        if on_error == "raise":
            assert said(engine, "the cache", max_tokens=4, temperature=0.0) == expected[0]  # the run is still open
            with pytest.raises(CaptureFailed, match="disk full"):
                said(engine, "on", max_tokens=2, seed=1)
        else:
            with pytest.warns(RuntimeWarning, match="disk full"):
                answers = (
                    said(engine, "the cache", max_tokens=4, temperature=0.0),
                    said(engine, "on", max_tokens=2, seed=1),
                )
            assert answers == expected
        assert isinstance(tape.error, LogWriteFailed)
        tape.flush()
    with open_log(tmp_path / "L") as log:
        assert log.events(tape.run_id, "captured")[-1].op is Op.LOST


def test_a_log_folder_gets_a_segment_for_each_capture(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for _ in range(2):
        with llama() as engine, capture(engine, log=folder):
            engine.eval([5, 6])
    with open_log(folder) as log:
        assert len(log.runs()) == 2


def test_a_tap_on_a_class_hears_its_own_object_alone() -> None:
    class Native:
        __slots__ = ()

        def ask(self, n: int) -> int:
            return n

    one, other, original = Native(), Native(), Native.ask
    with tapped(one, {"ask": lambda call, args, kwargs: -call(*args, **kwargs)}):
        with tapped(other, {"ask": lambda call, args, kwargs: 100 + call(*args, **kwargs)}):
            assert (one.ask(1), other.ask(2), Native().ask(3)) == (-1, 102, 3)
        assert (one.ask(1), other.ask(2)) == (-1, 2)
    assert Native.ask is original


def test_a_guard_that_ended_lets_every_call_through() -> None:
    guard = Guard("stop", lambda err: None)
    guard.end()
    with guard.call("a"), guard.call("b"):
        guard.note(lambda: pytest.fail("nothing is recorded any more"))
