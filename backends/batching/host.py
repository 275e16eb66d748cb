"""The process a pipeline runs in: `python -m kvtape.backends.batching.host CONTROL CANCELS PARENT`.

Some options of the pipeline damage the memory of their process (`apply_rotation` ends it, later and elsewhere), so none
runs in the process that asks. One pipeline, one call at a time; it ends with the parent.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import threading
from typing import Any

from kvtape.backends.batching.config import BatchingConfig, Eviction, Sparse
from kvtape.backends.batching.pipeline import BatchingPipeline
from kvtape.backends.errors import KvtapeError
from kvtape.backends.isolated.serving import answer_all, die

__all__ = ["PipelineHost", "config_fields", "config_of", "main"]


def config_fields(config: BatchingConfig) -> dict[str, Any]:
    """As values that can be sent."""
    return dataclasses.asdict(config)


def config_of(fields: dict[str, Any]) -> BatchingConfig:
    """What `config_fields` was made of."""
    eviction, sparse = fields["eviction"], fields["sparse"]
    return BatchingConfig(
        **fields
        | {
            "eviction": None if eviction is None else Eviction(**eviction),
            "sparse": None if sparse is None else Sparse(**sparse),
        }
    )


class PipelineHost:
    """Serves one parent."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pipeline: BatchingPipeline | None = None

    def run(self) -> None:
        """Until the parent closes its end."""
        answer_all(self._control, lambda operation: getattr(self, f"_{operation}"))

    def _open(self, path: str, config: dict[str, Any]) -> str:
        self._pipeline = BatchingPipeline(path, config_of(config))
        return self._pipeline.version

    def _generate(self, prompt: list[int], n: int, text: str | None, echo: bool) -> dict[str, Any]:
        made = self._opened().generate(prompt, n, text=text, echo=echo)
        return {
            "tokens": list(made.tokens),
            "log_probs": list(made.log_probs),
            "prompt_log_probs": list(made.prompt_log_probs),
            "steps": [[s.tokens, s.blocks] for s in made.steps],
        }

    def _decode(self, tokens: list[int]) -> str:
        return self._opened().decode(tokens)

    def _opened(self) -> BatchingPipeline:
        if self._pipeline is None:
            raise KvtapeError("no pipeline was opened")
        return self._pipeline


def main(arguments: list[str]) -> None:
    """Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, cancels = int(arguments[0]), int(arguments[1])
    threading.Thread(target=_end_with_parent, args=(cancels,), daemon=True).start()
    try:
        PipelineHost(socket.socket(fileno=control)).run()
    except BaseException:
        die()
    # Not through the interpreter's end: what an option did to this memory must not be asked for again.
    os._exit(0)


def _end_with_parent(cancels: int) -> None:
    """Nothing is ever written to this pipe; that it closes is the end of the parent."""
    os.read(cancels, 1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
