"""A move: one copy that was asked for, how urgent it is, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum, IntEnum


class Priority(IntEnum):
    """How urgent a move is; the lower goes first."""

    DEMAND = 0
    """Somebody waits for it, or is about to."""
    PREFETCH = 1
    """The next pass is expected to ask for it."""
    WRITE_DOWN = 2
    """Its block can leave the device afterwards."""
    RECALL = 3
    """Nobody will miss it: the block would be streamed instead."""


class Direction(Enum):
    """Which of the two threads does it."""

    UP = "up"
    """Home to slot."""
    DOWN = "down"
    """Slot to home."""

    @property
    def other(self) -> Direction:
        """The opposite one."""
        return Direction.DOWN if self is Direction.UP else Direction.UP


class MoveState(Enum):
    """Waiting, then running, then done or failed; only what waits can be cancelled."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_OVER = frozenset({MoveState.DONE, MoveState.FAILED, MoveState.CANCELLED})


class Move:
    """One copy that was asked for. Made and changed by `MoveQueue` only.

    Attributes:
        direction: which way it goes.
        priority: how urgent it is now; only ever raised.
        state: where it stands.
        num_bytes: bytes that the queue holds for it.
        run: does the copy; None once it is over.
        key: what another request must have to be the same.
        num_holders: requesters that have not let go of it.
        error: what the copy raised.
    """

    __slots__ = (
        "direction",
        "error",
        "key",
        "num_bytes",
        "num_holders",
        "priority",
        "run",
        "state",
    )

    def __init__(
        self,
        run: Callable[[], None],
        direction: Direction,
        priority: Priority,
        key: Hashable,
        num_bytes: int,
    ) -> None:
        self.direction = direction
        self.priority = priority
        self.state = MoveState.WAITING
        self.num_bytes = num_bytes
        self.run: Callable[[], None] | None = run
        self.key = key
        self.num_holders = 1
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether it does not touch memory any more, and never will again."""
        return self.state in _OVER

    def check(self) -> None:
        """Raise what the copy raised, if it did."""
        if self.error is not None:
            raise self.error
