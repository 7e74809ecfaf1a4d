"""What can go wrong, by whose fault: the caller's, or the machine's."""

from __future__ import annotations


class SpecOffloadError(ValueError):
    """A request that cannot be honoured; names the value, the bound and the remedy."""


class ConfigError(SpecOffloadError):
    """A configuration value or key that means nothing here."""


class BudgetError(SpecOffloadError):
    """A memory budget below one working set.

    Attributes:
        required_bytes: the smallest budget that would do.
    """

    def __init__(self, message: str, *, required_bytes: int) -> None:
        super().__init__(message)
        self.required_bytes = required_bytes


class UnsupportedModelError(SpecOffloadError):
    """A model whose cache cannot be paged, or a pair that cannot speculate together."""


class SpillError(OSError):
    """A block could not be written to, or read back from, the disk tier.

    Carries `errno` and `filename` like every `OSError`. No data was lost: the block is still
    where it was before the move.
    """


class CorruptBlockError(SpillError):
    """A block read back from disk does not match its checksum; it was not served."""
