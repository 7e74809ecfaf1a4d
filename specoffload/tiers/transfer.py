"""Carries blocks between the device arena and their homes, while the main thread computes.

One interface, two engines: this file's copies with threads, for a device that is RAM, and
`stream_mover.py`'s with the streams of a GPU. Every wait names the `Guard` it is for.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import torch

from specoffload.tiers.access import Guard
from specoffload.tiers.device import DeviceArena
from specoffload.tiers.homes import Homes, Places
from specoffload.tiers.move import Direction, Move, Priority
from specoffload.tiers.queue import MoveQueue

QUEUE_CAPACITY: Final = 64
"""Most moves that wait, demands aside: as many stores as a prompt chunk of a large model makes."""


class AnyMove(Protocol):
    """What the pool sees of a move."""

    @property
    def is_over(self) -> bool:
        """Whether it does not touch memory any more, and never will again."""

    def check(self) -> None:
        """Raise what the copy raised, if it did."""


MoveT = TypeVar("MoveT", bound=AnyMove)


class Mover(ABC, Generic[MoveT]):
    """Copies between an arena and homes.

    Attributes:
        stall_s: seconds that the main thread spent waiting for a move.
    """

    def __init__(self) -> None:
        self.stall_s = 0.0

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes held for moves in flight."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Most bytes held for moves in flight at once."""

    @abstractmethod
    def load(
        self,
        homes: Homes,
        arena: DeviceArena,
        slots: Places,
        places: Places,
        *,
        priority: Priority = Priority.DEMAND,
    ) -> MoveT:
        """Start copying homes into slots, or join the move in flight that does the same.

        LOAD_AFTER_READ: the copy comes after everything that compute was given before this call.
        The caller keeps slots and homes from every other use until it has waited for the move.
        """

    @abstractmethod
    def store(
        self,
        homes: Homes,
        arena: DeviceArena,
        slots: Places,
        places: Places,
        *,
        priority: Priority = Priority.WRITE_DOWN,
    ) -> MoveT:
        """Start copying slots into homes, or join the move in flight that does the same.

        STORE_AFTER_WRITE: the copy comes after everything that compute was given before this call.
        The caller keeps slots and homes from every other use until it has waited for the move.
        """

    @abstractmethod
    def join(self, move: MoveT) -> None:
        """Hold a move in flight as well: it becomes a demand, and needs one `cancel` more."""

    @abstractmethod
    def wait(self, move: MoveT, guard: Guard) -> None:
        """Order what a move reads and writes before whatever compute does next.

        Args:
            move: what to wait for; a demand from now on.
            guard: what this wait protects.
        """

    @abstractmethod
    def cancel(self, move: MoveT) -> None:
        """Let go of a move; on return its places may be used again if nobody else holds it."""

    @abstractmethod
    def quiesce(self) -> None:
        """Drop every move that waits and return when none runs; how they went no longer matters."""

    @abstractmethod
    def pin(self, memory: torch.Tensor) -> None:
        """Prepare host memory for copies."""

    @abstractmethod
    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`. Precondition: no move is in flight."""

    @abstractmethod
    def close(self) -> None:
        """Finish what runs, drop what waits, end the threads. Idempotent."""


class ThreadMover(Mover[Move]):
    """Copies within RAM and to the disk: one thread for each direction, started when needed.

    A demand load never waits behind a store.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue = MoveQueue(QUEUE_CAPACITY)
        # A runner that is forgotten rather than closed leaves no threads behind.
        weakref.finalize(self, self._queue.stop)

    @property
    def num_bytes(self) -> int:  # noqa: D102
        return self._queue.num_bytes

    @property
    def peak_bytes(self) -> int:  # noqa: D102
        return self._queue.peak_bytes

    def load(  # noqa: D102
        self,
        homes: Homes,
        arena: DeviceArena,
        slots: Places,
        places: Places,
        *,
        priority: Priority = Priority.DEMAND,
    ) -> Move:
        # LOAD_AFTER_READ: the queue's lock orders what this thread did before the copy.
        return self._queue.submit(
            partial(homes.read, arena, slots, places),
            Direction.UP,
            priority,
            key=move_key(Direction.UP, homes, arena, slots, places),
            num_bytes=slots.nbytes + places.nbytes,
        )

    def store(  # noqa: D102
        self,
        homes: Homes,
        arena: DeviceArena,
        slots: Places,
        places: Places,
        *,
        priority: Priority = Priority.WRITE_DOWN,
    ) -> Move:
        # STORE_AFTER_WRITE: likewise.
        return self._queue.submit(
            partial(homes.write, arena, slots, places),
            Direction.DOWN,
            priority,
            key=move_key(Direction.DOWN, homes, arena, slots, places),
            num_bytes=slots.nbytes + places.nbytes,
        )

    def join(self, move: Move) -> None:  # noqa: D102
        self._queue.join(move, Priority.DEMAND)

    def wait(self, move: Move, guard: Guard) -> None:
        """Return when a move is over, counting the wait as a stall."""
        del guard  # for the reader, and for tests that leave one out
        if move.is_over:
            self._queue.wait(move)
            return
        start = time.perf_counter()
        try:
            self._queue.wait(move)
        finally:
            self.stall_s += time.perf_counter() - start

    def cancel(self, move: Move) -> None:  # noqa: D102
        if not self._queue.cancel(move):
            self.wait(move, Guard.REUSE_AFTER_CANCEL)

    def quiesce(self) -> None:  # noqa: D102
        for move in self._queue.drop_waiting():
            self.wait(move, Guard.FREE_AFTER_MOVES)

    def pin(self, memory: torch.Tensor) -> None:
        """Do nothing: the processor copies from any memory."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def close(self) -> None:  # noqa: D102
        self._queue.close()


def move_key(
    direction: Direction, homes: Homes, arena: DeviceArena, slots: Places, places: Places
) -> tuple[Direction, int, int, bytes, bytes]:
    """Return what two moves have in common if they do the same while both are in flight."""
    return direction, id(homes), id(arena), slots.tobytes(), places.tobytes()
