"""Token ids before a layer sees them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.errors import EmptyPrompt
from kvtape.backends.token_ids import check_tokens

__all__ = ["Ids", "checked_tokens"]

Ids = npt.NDArray[np.int32]
"""Token ids `[n]`, all in the vocabulary."""


def checked_tokens(tokens: Sequence[int] | npt.NDArray[np.integer], n_vocab: int) -> Ids:
    """The ids as int32 `[n]`. Raises EmptyPrompt for none, InputRejected for one that is not in the vocabulary."""
    if len(tokens) == 0:
        raise EmptyPrompt
    return check_tokens(tokens, n_vocab)  # type: ignore[arg-type]
