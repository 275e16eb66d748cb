"""Looking at drafts: several proposed tokens in one `llama_decode`, the rows of those that do not stay removed.

Where the numbers of such a call are those of calls for one token is llama.cpp's own affair: its kernels differ. With
flash attention each token is computed for itself, also beside others, and quantised weights make integer products that
do not depend on their company. So here it is looked at: a few tokens are computed both ways before drafts are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvtape.backends.errors import FatalClass, UnsupportedOperation
from kvtape.backends.llama.context import LIVE, SCRATCH
from kvtape.backends.llama.core import SessionCore
from kvtape.backends.token_ids import check_tokens
from kvtape.backends.verifying import Keep, Verified, check_kept, check_one_call, no_verifying_reason

__all__ = ["DraftCore"]

_PROBE_TOKENS: Final = 12
_SPLIT_CELLS: Final = 512
"""From so many cells on, flash attention of a single token is shared out to the threads, that of several is not."""

_ROUNDING: Final = 1e-3
"""Logits that differ by more have been carried on by something that rounds; then no margin is safe."""

_MARGIN: Final = 0.05


class DraftCore(SessionCore):
    """A session that verifies drafts, where its memory is one plain cache and several tokens come out as one does."""

    _difference: float | None = None

    def verify_refusal(self) -> str | None:
        """See `verifying.Verifier`."""
        if self._memory_facts.kind == "windowed":
            return "a windowed cache writes rejected rows over ones that the next token still sees"
        if (why := no_verifying_reason(self.capabilities, self.refusal)) is not None:
            return why
        if self.config.flash_attention != "on":
            return "without flash attention llama.cpp computes several tokens otherwise than one; open with --flash on"
        if self.config.threads > 1 and self._context.n_ctx >= _SPLIT_CELLS:
            return "several threads share a long attention out for one token, not for several; open with one thread"
        if self._probed() > _ROUNDING:
            return f"several tokens at once give logits that differ by {self._probed():.3g} from those of single ones"
        return None

    @property
    def verify_margin(self) -> float:
        """0 where a few tokens came out of one call as they came out of single ones, to the bit."""
        return _MARGIN if self._probed() else 0.0

    def _probed(self) -> float:
        """The largest difference of logits between the two ways; measured once, in the scratch sequence."""
        if self._difference is None:
            with self._operation(FatalClass.DECODE_FAILED):
                ids = (np.arange(_PROBE_TOKENS, dtype=np.int64) * 37 + 11) % self.facts.n_vocab
                tokens, failure = ids.astype(np.int32), FatalClass.DECODE_FAILED
                self._memory.flush()
                with self._scratch_dropped_on_error():
                    alone = [self._decoder.run(tokens[i : i + 1], i, SCRATCH, failure).logits for i in range(len(ids))]
                    self._memory.drop_scratch()
                    n = min(len(ids), self.config.chunk)
                    together = self._decoder.run_each(tokens[:n], 0, SCRATCH, failure)
                self._memory.drop_scratch()
                self._difference = float(np.abs(np.stack(alone[:n]) - together).max())
        return self._difference

    def verify(self, tokens: Sequence[int], tape_start: int, keep: Keep) -> Verified:
        """See `verifying.Verifier`. The engine's own positions afterwards must be those of the books."""
        with self._operation(FatalClass.DECODE_FAILED):
            if (why := self.verify_refusal()) is not None:
                raise UnsupportedOperation("verify", why)
            ids = check_tokens(tokens, self.facts.n_vocab)
            check_one_call(len(ids), self.config.chunk)
            self._check_room(len(ids))
            at = self._memory.next_position
            self._books.append(tokens, tape_start, at)  # refuses a place that is taken
            with self._undone_on_error(at):
                each = self._decoder.run_each(ids, at, LIVE, FatalClass.DECODE_FAILED)
                kept = check_kept(keep(each), len(ids))
                if kept < len(ids):
                    self._memory.remove(at + kept, -1)
                self._settle(self._books.append(tokens[:kept], tape_start, at) if kept else self._books)
            return Verified.of(kept, each, 1)
