"""Token ids before any engine sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtape.backends.errors import InputRejected
from kvtape.backends.token_ids import check_token, check_tokens


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "no tokens"),
        ([1, True], "truth value"),
        ([True], "integers"),
        ([1.0], "integers"),
        (["a"], "integers"),
        ([[1, 2]], "integers"),
        ([2**70], "fit 64 bits"),
        ([1, 2**40], "token 1099511627776 at index 1"),
        ([3, -1], "token -1 at index 1"),
        ([9, 10], "token 10 at index 1 is not in the vocabulary of 10"),
    ],
)
def test_what_is_no_token_id_is_rejected(tokens: Any, message: str) -> None:
    with pytest.raises(InputRejected, match=message):
        check_tokens(tokens, 10)


def test_ids_are_int32_whatever_they_came_as() -> None:
    for tokens in ([0, 9], (0, 9), np.array([0, 9], np.uint8), [np.int64(0), np.int64(9)]):
        ids = check_tokens(tokens, 10)  # type: ignore[arg-type]
        assert (ids.dtype, ids.tolist()) == (np.int32, [0, 9])
    assert check_token(9, 10).tolist() == [9]
