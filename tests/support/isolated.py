"""Hosts for tests: tiny engines in processes of their own, and what is left over of them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvtape.backends.errors import EngineFault, FatalClass
from kvtape.backends.isolated.backend import IsolatedBackend
from kvtape.backends.isolated.engine import IsolatedEngine, open_isolated
from kvtape.backends.isolated.process import Limits
from kvtape.backends.protocol import Backend, SessionConfig
from support import llama_tiny, openvino_tiny

__all__ = [
    "assert_lost",
    "awaits_an_answer",
    "children",
    "descriptors",
    "engine",
    "interrupted_in_a_call",
    "isolated_llama",
    "model_file",
    "rigged",
    "session",
    "until",
]


def model_file(name: str) -> Path:
    """The tiny llama model of each engine's tests."""
    return llama_tiny.model_file() if name == "llama" else openvino_tiny.tiny_path("llama")


@functools.cache
def engine(name: str = "llama") -> IsolatedEngine:
    """One for all tests that leave it as they found it; ends with this process."""
    return open_isolated(name, model_file(name))


def isolated_llama(config: SessionConfig) -> Backend:
    """For the conformance suite: `pytest --kvtape-backend support.isolated:isolated_llama`."""
    return engine("llama").open(config)


def session(host: IsolatedEngine | None = None, **config: Any) -> IsolatedBackend:
    """A session with f32 rows and a cold store."""
    asked: dict[str, Any] = {"n_ctx": 512, "kv_type_k": "f32", "kv_type_v": "f32", "cold_budget_tokens": 256}
    return (host or engine()).open(SessionConfig(**{**asked, **config}))


def rigged(rig: str, name: str = "llama", path: Path | None = None, *, limits: Limits | None = None) -> IsolatedEngine:
    """An engine whose sessions can be made to take the host down (`support.rigged_engines`)."""
    where = path or model_file(name)
    return open_isolated(name, where, {"rig": rig}, loader="support.rigged_engines:load", limits=limits)


def assert_lost(error: EngineFault, *words: str) -> None:
    """It says that the device is lost, and these words."""
    assert error.fatal_class is FatalClass.DEVICE_LOST
    for word in words:
        assert word in error.cause


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for it, however slow the machine is; fails when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def awaits_an_answer(thread: int | None) -> bool:
    """Whether the thread with this ident has sent a request to a host and waits for what it says."""
    frame = sys._current_frames().get(thread or 0)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_qualname)
        frame = frame.f_back
    return {"receive", "Channel.call"} <= names


@contextlib.contextmanager
def interrupted_in_a_call() -> Iterator[None]:
    """A Ctrl-C while the body waits for a host's answer."""
    main, over = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        until(lambda: over.is_set() or awaits_an_answer(main))
        if not over.is_set():
            signal.pthread_kill(main, signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def descriptors() -> int:
    """Open file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> set[int]:
    """Processes that this one has started and that are not reaped, zombies too."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                found.add(int(entry.name))
    return found
