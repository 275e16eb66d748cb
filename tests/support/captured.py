"""Tiny `llama_cpp.Llama`s as a process of somebody else drives them, and what a capture of one left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtape.planner.events import Event
from kvtape.planner.residency import ResidencyState, fold
from kvtape.replay.identities import check_identities
from kvtape.replay.opt_ins import speculation_findings
from kvtape.traces.reader import open_log
from kvtape.traces.verify import verify
from support.llama_tiny import model_file

__all__ = ["CapturedLog", "llama", "read_back", "said"]


@contextmanager
def llama(arch: str = "llama", **options: Any) -> Iterator[Any]:
    """One with float32 rows on one thread, in a context of 256 and in pieces of 32 tokens."""
    import llama_cpp

    asked = {"n_ctx": 256, "n_batch": 32, "n_threads": 1, "n_threads_batch": 1, "type_k": 0, "type_v": 0, "seed": 1}
    made = llama_cpp.Llama(str(model_file(arch)), verbose=False, **{**asked, **options})
    try:
        yield made
    finally:
        made.close()


def said(llama: Any, prompt: str, **options: Any) -> str:
    """The text of a completion; with `stream` put together from its pieces."""
    answer = llama.create_completion(prompt, **options)
    parts = answer if options.get("stream") else [answer]
    return "".join(part["choices"][0]["text"] for part in parts)


class CapturedLog:
    """The one session of a captured log, which verifies, folds, and breaks no identity of its counters."""

    def __init__(self, path: Path) -> None:
        assert not verify(path).findings
        with open_log(path) as log:
            self.run = log.default_run()
            (self.row,) = log.sessions()
            self.events: list[Event] = log.events(self.run.run_id, self.row.session_id)
            self.tokens = log.tokens(self.run.run_id, self.row.session_id)
            broken = [b for check in check_identities(lambda q: log.sql(q)[1]) for b in check.broken]
        self.state: ResidencyState = fold(self.events)
        assert not broken
        assert not speculation_findings(self.events)

    @property
    def ops(self) -> list[str]:
        return [str(e.op) for e in self.events]

    def told(self, *columns: str) -> list[tuple[Any, ...]]:
        """The op and these columns of each event."""
        return [(str(e.op), *(getattr(e, c) for c in columns)) for e in self.events]


def read_back(path: Path) -> CapturedLog:
    return CapturedLog(path)
