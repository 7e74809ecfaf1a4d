"""Carries blocks between the device arena and their homes, on threads of its own.

The main thread computes and decides; the two threads here only copy bytes, one for each direction,
so that a demand load never waits behind a store. Every wait names the `Guard` it is for.
"""

from __future__ import annotations

import time
import weakref
from functools import partial

from specoffload.tiers.access import Guard
from specoffload.tiers.device import DeviceArena
from specoffload.tiers.homes import Homes, Places
from specoffload.tiers.move import Direction, Move, Priority
from specoffload.tiers.queue import MoveQueue

_CAPACITY = 64
"""Most moves that wait, demands aside: as many stores as a prompt chunk of a large model makes."""


class Mover:
    """Copies between a RAM arena and homes; its threads start when first needed.

    Attributes:
        stall_s: seconds that the main thread spent waiting for a move.
    """

    def __init__(self) -> None:
        self.stall_s = 0.0
        self._queue = MoveQueue(_CAPACITY)
        # A runner that is forgotten rather than closed leaves no threads behind.
        weakref.finalize(self, self._queue.stop)

    @property
    def num_bytes(self) -> int:
        """Bytes held for moves in flight."""
        return self._queue.num_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes held for moves in flight at once."""
        return self._queue.peak_bytes

    def load(
        self,
        homes: Homes,
        arena: DeviceArena,
        slots: Places,
        places: Places,
        *,
        priority: Priority = Priority.DEMAND,
    ) -> Move:
        """Start copying homes into slots, or join the move in flight that does the same.

        LOAD_AFTER_READ: the caller is done with the slots, and submitting orders what it did before
        the copy. It keeps them from every other use until the move is over.
        """
        return self._queue.submit(
            partial(homes.read, arena, slots, places),
            Direction.UP,
            priority,
            key=(Direction.UP, id(homes), id(arena), slots.tobytes(), places.tobytes()),
            num_bytes=slots.nbytes + places.nbytes,
        )

    def store(
        self,
        homes: Homes,
        arena: DeviceArena,
        slots: Places,
        places: Places,
        *,
        priority: Priority = Priority.WRITE_DOWN,
    ) -> Move:
        """Start copying slots into homes, or join the move in flight that does the same.

        STORE_AFTER_WRITE: the caller wrote the slots before this call, and submitting orders that
        before the copy. It keeps slots and homes from every other use until the move is over.
        """
        return self._queue.submit(
            partial(homes.write, arena, slots, places),
            Direction.DOWN,
            priority,
            key=(Direction.DOWN, id(homes), id(arena), slots.tobytes(), places.tobytes()),
            num_bytes=slots.nbytes + places.nbytes,
        )

    def join(self, move: Move) -> None:
        """Hold a move in flight as well: it becomes a demand, and needs one `cancel` more."""
        self._queue.join(move, Priority.DEMAND)

    def wait(self, move: Move, guard: Guard) -> None:
        """Return when a move is over, counting the wait as a stall.

        Orders what the move read and wrote before whatever the caller does next.

        Args:
            move: what to wait for; a demand from now on.
            guard: what this wait protects.
        """
        del guard  # for the reader, and for tests that leave one out
        if move.is_over:
            self._queue.wait(move)
            return
        start = time.perf_counter()
        try:
            self._queue.wait(move)
        finally:
            self.stall_s += time.perf_counter() - start

    def cancel(self, move: Move) -> None:
        """Let go of a move; return when its places are free if nobody else holds it."""
        if not self._queue.cancel(move):
            self.wait(move, Guard.REUSE_AFTER_CANCEL)

    def quiesce(self) -> None:
        """Drop every move that waits and return when none runs; how they went no longer matters."""
        for move in self._queue.drop_waiting():
            self.wait(move, Guard.FREE_AFTER_MOVES)

    def close(self) -> None:
        """Finish what runs, drop what waits, end the threads. Idempotent."""
        self._queue.close()
