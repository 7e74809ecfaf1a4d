"""The frontier of each row: which cached tokens are committed, which only drafted.

Knows token counts. Knows nothing of blocks, slots or models: a drafted token that is rejected
leaves no trace because nothing but this file ever knew of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Ledger:
    """Committed and provisional token counts of `num_rows` rows, all starting at nothing.

    Tokens `[0, committed)` of a row are final. Tokens `[committed, committed + provisional)` are in
    the cache because a forward pass wrote them, and may still be rolled back.
    """

    def __init__(self, num_rows: int) -> None:
        self._committed = np.zeros(num_rows, np.int64)
        self._provisional = np.zeros(num_rows, np.int64)

    @property
    def committed(self) -> npt.NDArray[np.int64]:
        """Committed tokens of every row, `[row]`; a copy."""
        return self._committed.copy()

    @property
    def frontier(self) -> npt.NDArray[np.int64]:
        """Tokens in the cache of every row, provisional ones included, `[row]`."""
        return self._committed + self._provisional

    def advance(self, rows: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]) -> None:
        """Record that a forward pass wrote `num_tokens[i]` tokens at the frontier of `rows[i]`."""
        if (num_tokens < 0).any():
            raise ValueError(f"num_tokens={num_tokens.tolist()} must not be negative")
        self._provisional[rows] += num_tokens

    def commit(self, row: int, num_tokens: int) -> None:
        """Make the first `num_tokens` provisional tokens of a row final.

        Raises:
            ValueError: the row has fewer provisional tokens.
        """
        held = int(self._provisional[row])
        if not 0 <= num_tokens <= held:
            raise ValueError(
                f"cannot commit {num_tokens} tokens of row {row}: {held} are provisional"
            )
        self._committed[row] += num_tokens
        self._provisional[row] -= num_tokens

    def rollback(self, row: int) -> int:
        """Forget the provisional tokens of a row; return how many there were."""
        held = int(self._provisional[row])
        self._provisional[row] = 0
        return held

    def reset(self, row: int) -> None:
        """Forget everything about a row."""
        self._committed[row] = 0
        self._provisional[row] = 0
