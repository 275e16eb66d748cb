"""A pipeline in a process of its own: what an option does to its memory ends that process, never this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtape.backends.batching.config import BatchingConfig
from kvtape.backends.batching.files import read_batching_shape
from kvtape.backends.batching.host import config_fields
from kvtape.backends.batching.occupancy import Step
from kvtape.backends.batching.pipeline import BatchingPipeline, Generation
from kvtape.backends.errors import SessionClosed
from kvtape.backends.isolated.channel import Channel
from kvtape.backends.isolated.process import HostProcess, Limits

__all__ = ["IsolatedPipeline", "OpenPipeline", "Pipeline"]

_MODULE = "kvtape.backends.batching.host"


class IsolatedPipeline:
    """As `pipeline.BatchingPipeline`. A process that dies is EngineFault device_lost with how it died; the next call
    starts another."""

    def __init__(self, path: str | Path, config: BatchingConfig, limits: Limits | None = None) -> None:
        """Starts the process and compiles. Raises as `BatchingPipeline` does, before a process is started if it can."""
        self.config = config
        self.shape = read_batching_shape(path)
        self.version = ""
        self._path = str(Path(path).absolute())
        self._limits = limits or Limits()
        self._process: HostProcess | None = None
        self._channel: Channel | None = None
        self._closed = False
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def generate(self, prompt: Sequence[int], n: int, *, text: str | None = None, echo: bool = False) -> Generation:
        """See `BatchingPipeline.generate`; EngineFault device_lost besides."""
        made: dict[str, Any] = self._open().call(dict, "generate", [list(prompt), n, text, echo])
        return Generation(
            tuple(made["tokens"]),
            tuple(made["log_probs"]),
            tuple(made["prompt_log_probs"]),
            tuple(Step(*step) for step in made["steps"]),
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, control tokens written out."""
        return self._open().call(str, "decode", [[int(t) for t in tokens]])

    def close(self) -> None:
        """End the process. Idempotent."""
        self._closed = True
        self._drop()

    def _open(self) -> Channel:
        if self._closed:
            raise SessionClosed("the pipeline is closed")
        if self._channel is None or not self._channel.usable:
            self._drop()
            self._process = HostProcess(self._limits, _MODULE)
            self._channel = Channel(self._process.control, self._process, 0, self._limits.load)
            self.version = self._channel.call(str, "open", [self._path, config_fields(self.config)])
        return self._channel

    def _drop(self) -> None:
        if self._process is None:
            return
        # A call that was interrupted may still be running there.
        if self._channel is not None and not self._channel.usable:
            self._process.kill()
        self._process.close()
        self._process = self._channel = None


Pipeline = BatchingPipeline | IsolatedPipeline
OpenPipeline = Callable[[Path, BatchingConfig], Pipeline]
