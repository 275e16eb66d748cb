"""Driving a `ContinuousBatchingPipeline`: a prompt in, tokens with their log-probabilities and the curve of its cache
out, and an error for everything that it would pass over in silence.

It has no logits and no teacher forcing of its own. Two ways round that: with `echo` it gives the log-probability of
every token of the *prompt*; and a grammar that allows one text only forces the answer's text (not how it is cut into
tokens), while the log-probabilities stay those over the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvtape.backends.batching.config import BLOCK, BatchingConfig
from kvtape.backends.batching.files import read_batching_shape
from kvtape.backends.batching.native import forced_generation, scheduler
from kvtape.backends.batching.occupancy import Step, block_bytes, blocks_in_use
from kvtape.backends.errors import (
    ContextOverflow,
    EngineFault,
    EnvironmentProblem,
    FatalClass,
    InputRejected,
    SessionClosed,
)
from kvtape.backends.openvino.compiled import Profile
from kvtape.backends.openvino.graph import last_line
from kvtape.backends.openvino.signal_stack import kept_signal_stack
from kvtape.backends.token_ids import check_tokens

__all__ = ["BatchingPipeline", "Generation"]

_SPARE_STEPS = 8
"""More than the steps that a prompt and its answer need: a pipeline that goes on longer never ends."""


@dataclass(frozen=True, slots=True)
class Generation:
    """`log_probs[i]`, nats, of `tokens[i]` over the whole vocabulary; `prompt_log_probs` of the prompt's tokens from
    the second on, empty without `echo`. `steps` in order, of a prompt that was cached in part from its last piece on;
    `decoding[i]` gave `tokens[i]`.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    prompt_log_probs: tuple[float, ...]
    steps: tuple[Step, ...]

    @property
    def decoding(self) -> tuple[Step, ...]:
        """The last step of the prompt, which gave the first token, and those after it."""
        return self.steps[-len(self.tokens) :] if self.tokens else ()


class BatchingPipeline:
    """One compiled pipeline; requests run alone, one after the other. After an error it is made anew by the next."""

    def __init__(self, path: str | Path, config: BatchingConfig) -> None:
        """Compiles. Raises UsageError for a file it would misread, EnvironmentProblem where it cannot be made."""
        self.config = config
        self.shape = read_batching_shape(path)
        self._path = Path(path)
        self._block_bytes = block_bytes(self.shape, config.kv_type)
        self._native: Any = None
        self._closed = False
        self._requests = 0
        self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def version(self) -> str:
        return str(_genai().get_version())

    def generate(self, prompt: Sequence[int], n: int, *, text: str | None = None, echo: bool = False) -> Generation:
        """`n` greedy tokens behind `prompt`, end tokens included; with `text`, those that spell its beginning.

        Raises InputRejected for ids outside the vocabulary and for a `text` that is over too soon, ContextOverflow when
        the trained context or the cache is too small, EngineFault for whatever fails inside.
        """
        ids = self._checked(prompt, n)
        native = self._open()
        handle = native.add_request(self._requests, _tensor(ids), forced_generation(_genai(), n, text, echo=echo))
        self._requests += 1
        blocks: list[int] = []
        tokens: list[int] = []
        log_probs: list[float] = []
        try:
            while native.has_non_finished_requests():
                if len(blocks) > self._pieces(len(ids)) + n + _SPARE_STEPS:
                    raise EngineFault(FatalClass.DECODE_FAILED, f"{len(blocks)} steps for {len(ids)} + {n} tokens")
                native.step()
                blocks.append(self._blocks(native.get_metrics()))
                while handle.can_read():
                    for output in handle.read().values():
                        tokens += output.generated_ids
                        log_probs += output.generated_log_probs
        except RuntimeError as err:
            self._abandon(handle)
            stage = FatalClass.DECODE_FAILED if tokens else FatalClass.PREFILL_FAILED
            raise EngineFault(stage, f"continuous batching: {last_line(err)}") from None
        except BaseException:
            self._abandon(handle)
            raise
        steps = self._steps(len(ids), n, blocks)
        made = self._result(handle, len(ids), n, tokens, log_probs, steps, echo=echo)
        # Behind the text the grammar allows end tokens alone, as many as were asked for.
        if text is not None and not text.startswith(self.decode(made.tokens).rstrip("\ufffd")):
            raise InputRejected(f"the text to force is over before {n} tokens; give more of it")
        return made

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, control tokens written out."""
        return str(self._open().get_tokenizer().decode([int(t) for t in tokens], skip_special_tokens=False))

    def close(self) -> None:
        """Idempotent."""
        self._native = None
        self._closed = True

    def _open(self) -> Any:
        if self._closed:
            raise SessionClosed("the pipeline is closed")
        if self._native is None:
            genai, asked = _genai(), self.config
            # The storage type is said to all three properties: left out it is u8.
            properties = Profile(asked.kv_type, asked.kv_type, asked.threads).properties()
            try:
                with kept_signal_stack():
                    self._native = genai.ContinuousBatchingPipeline(
                        str(self._path), scheduler(genai, asked), "CPU", properties
                    )
            except (RuntimeError, IndexError) as err:
                raise EnvironmentProblem(
                    f"{self._path.name}: continuous batching cannot be opened on this model: {last_line(err)}"
                    "; give another model, or leave --task batching"
                ) from None
        return self._native

    def _checked(self, prompt: Sequence[int], n: int) -> list[int]:
        if not isinstance(n, int) or n < 1:
            raise InputRejected(f"{n!r} tokens are asked for; ask for at least 1")
        if not len(prompt):
            raise InputRejected("the prompt is empty; continuous batching needs at least 1 token")
        ids = [int(t) for t in check_tokens(prompt, self.shape.n_vocab)]
        trained = self.shape.n_ctx_train
        if trained and len(ids) + n > trained:
            raise ContextOverflow(len(ids) + n, trained, "continuous batching would run past the trained context")
        return ids

    def _pieces(self, n_prompt: int) -> int:
        return -(-n_prompt // self.config.chunk)

    def _blocks(self, metrics: Any) -> int:
        size = int(metrics.cache_size_in_bytes)
        one_block, rest = divmod(size, self.config.blocks)
        if rest or self._block_bytes not in (None, one_block):
            raise EnvironmentProblem(
                f"continuous batching holds {size} bytes for {self.config.blocks} blocks, where a block of this model "
                f"takes {self._block_bytes}; this version of openvino-genai counts otherwise"
            )
        return blocks_in_use(float(metrics.cache_usage), size, one_block)

    def _steps(self, n_prompt: int, n: int, blocks: list[int]) -> list[Step]:
        """The prompt's pieces, the last of which gives the first token, then one step for each token but the last."""
        pieces = self._pieces(n_prompt)
        if len(blocks) < pieces + n - 1:
            # Part of the prompt was there already, and how much the pipeline does not say.
            pieces, blocks = 1, blocks[-n:]
        tokens = [min(n_prompt, (i + 1) * self.config.chunk) for i in range(pieces - 1)]
        tokens += range(n_prompt, n_prompt + n)
        return [Step(*step) for step in zip(tokens, blocks, strict=False)]

    def _abandon(self, handle: Any) -> None:
        """A cancelled request gives its blocks back; without that the pipeline complains on stderr when it goes."""
        native, self._native = self._native, None
        with suppress(RuntimeError):
            handle.cancel()
            native.step()

    def _result(
        self,
        handle: Any,
        n_prompt: int,
        n: int,
        tokens: list[int],
        log_probs: list[float],
        steps: list[Step],
        *,
        echo: bool,
    ) -> Generation:
        status = str(handle.get_status().name)
        if status == "IGNORED":
            got = max(0, len(tokens) - (n_prompt if echo else 0))
            why = f"the cache of {self.config.blocks} blocks was full after {got} new tokens (status IGNORED)"
            raise ContextOverflow(n_prompt + n, self.config.blocks * BLOCK, f"{why}; give it more blocks")
        if status != "FINISHED":
            raise EngineFault(FatalClass.DECODE_FAILED, f"continuous batching ended with status {status}")
        before = n_prompt if echo else 0
        if len(tokens) - before != n or len(log_probs) != len(tokens):
            raise EngineFault(
                FatalClass.DECODE_FAILED, f"continuous batching gave {len(tokens) - before} of {n} tokens"
            )
        # The first token of a prompt has no distribution before it; the pipeline says 1.0 there.
        if not all(map(math.isfinite, log_probs)):
            raise EngineFault(FatalClass.DECODE_FAILED, "continuous batching: log-probabilities that are no numbers")
        return Generation(tuple(tokens[before:]), tuple(log_probs[before:]), tuple(log_probs[1:before]), tuple(steps))


def _genai() -> Any:
    try:
        import openvino_genai
    except ImportError as err:
        raise EnvironmentProblem(f"openvino-genai is not installed ({err}); pip install 'kvtape[openvino]'") from None
    return openvino_genai


def _tensor(ids: Sequence[int]) -> Any:
    import openvino

    return openvino.Tensor(np.array([ids], np.int64))
