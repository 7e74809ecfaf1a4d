"""How many tokens to draft next: measured acceptance against measured time.

A verify of gamma + 1 rows costs more than a single pass, by how much depends on the machine, the
type and what has to be streamed. So nothing is assumed: times and acceptance are watched, and
gamma 0 (plain decoding) is one of the choices. A poor draft then costs only the rare rounds that
look whether it has become better.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_DECAY = 0.95
"""Weight that one round leaves to all earlier ones."""
_FIRST_GAMMAS = (1, 0)
"""Gammas of the first rounds: enough to place the line of verify times."""
_MARGIN = 1.02
"""Drafting must promise this much more than plain decoding: measurements are noisy."""
_FIRST_PAUSE = 16
_LONGEST_PAUSE = 256


def tokens_per_verify(acceptance: float, gamma: int) -> float:
    """Return the expected tokens of one verify, each drafted token being accepted independently."""
    if acceptance >= 1:
        return gamma + 1.0
    return float((1 - acceptance ** (gamma + 1)) / (1 - acceptance))


@dataclass
class FixedGamma:
    """Always the same gamma."""

    gamma: int

    def choose(self) -> int:
        """Return the tokens to draft in the next round."""
        return self.gamma

    def observe(
        self,
        *,
        gamma: int,
        drafted: int,
        accepted: int,
        rejections: int,
        draft_s: float,
        verify_s: float,
    ) -> None:
        """Learn nothing."""


@dataclass
class AutoGamma:
    """The gamma that promises most tokens per second, by what was measured so far.

    Args:
        max_gamma: the largest choice.
    """

    max_gamma: int
    _rounds: int = 0
    # Half an accepted and half a rejected token to start with: a first round proves little.
    _accepted: float = 0.5
    _rejected: float = 0.5
    _draft_s: float = 0.0
    _draft_tokens: float = 0.0
    # Sums for the line verify_s = a + b * rows, older rounds weighing less.
    _line: np.ndarray[tuple[int], np.dtype[np.float64]] = field(default_factory=lambda: np.zeros(5))
    _pause: int = _FIRST_PAUSE
    _next_look: int = 0

    def choose(self) -> int:
        """Return the tokens to draft in the next round."""
        if self._rounds < len(_FIRST_GAMMAS):
            return min(_FIRST_GAMMAS[self._rounds], self.max_gamma)
        gamma = self._best()
        if gamma == 0 and self.max_gamma and self._rounds >= self._next_look:
            return 1
        return gamma

    def observe(
        self,
        *,
        gamma: int,
        drafted: int,
        accepted: int,
        rejections: int,
        draft_s: float,
        verify_s: float,
    ) -> None:
        """Learn from a round.

        Args:
            gamma: tokens drafted for the longest row.
            drafted: tokens drafted over all rows.
            accepted: tokens accepted over all rows.
            rejections: rows whose draft was rejected at some token.
            draft_s: seconds of drafting.
            verify_s: seconds of the verify.
        """
        self._rounds += 1
        rows = gamma + 1
        self._line *= _DECAY
        self._line += np.array([1, rows, rows * rows, verify_s, rows * verify_s])
        if not drafted:
            return
        self._accepted = _DECAY * self._accepted + accepted
        self._rejected = _DECAY * self._rejected + rejections
        self._draft_s = _DECAY * self._draft_s + draft_s
        self._draft_tokens = _DECAY * self._draft_tokens + gamma
        if self._rounds > len(_FIRST_GAMMAS):
            # Looking costs a round of drafting: look less often each time it was in vain.
            self._pause = (
                min(2 * self._pause, _LONGEST_PAUSE) if self._best() == 0 else _FIRST_PAUSE
            )
            self._next_look = self._rounds + self._pause

    def _verify_s(self, gamma: int) -> float:
        count, rows, squares, seconds, products = self._line
        spread = count * squares - rows * rows
        slope = (count * products - rows * seconds) / spread if spread > 1e-9 else 0.0
        slope = max(0.0, float(slope))
        mean = float(seconds / count)
        return max(mean + slope * (gamma + 1 - float(rows / count)), 0.1 * mean)

    def _best(self) -> int:
        if not self._draft_tokens:
            return 0
        acceptance = self._accepted / (self._accepted + self._rejected)
        draft_s = self._draft_s / self._draft_tokens
        plain = 1 / self._verify_s(0)
        rates = [
            tokens_per_verify(acceptance, gamma) / (gamma * draft_s + self._verify_s(gamma))
            for gamma in range(1, self.max_gamma + 1)
        ]
        if not rates or max(rates) < _MARGIN * plain:
            return 0
        return 1 + int(np.argmax(rates))
