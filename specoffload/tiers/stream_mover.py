"""The transfer engine of a device with streams: copies are queued on it, and the host goes on.

Blocks between the device and host memory are given to the copy streams at once; compute waits for
them on the device. Blocks on disk pass through pinned buffers on the two threads of a `MoveQueue`,
in order of urgency; only for those does the main thread wait.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Generic

import numpy as np
import torch

from specoffload.tiers.access import Guard, active_log
from specoffload.tiers.bounce import Bounce
from specoffload.tiers.device import DeviceArena
from specoffload.tiers.homes import Homes, Places
from specoffload.tiers.move import Direction, Move, Priority
from specoffload.tiers.queue import MoveQueue
from specoffload.tiers.streams import EventT, Mark, StreamName, Streams
from specoffload.tiers.transfer import QUEUE_CAPACITY, Mover, move_key

_STREAM_OF: Final = {Direction.UP: StreamName.UP, Direction.DOWN: StreamName.DOWN}


class StreamMove(Generic[EventT]):
    """One copy: marks in a copy stream, and a job on a thread where the disk has a part in it.

    Attributes:
        direction: which way it goes.
        key: what another request must have to be the same.
        begun: where its stream was when it was submitted, the first part of its time.
        after: the point of compute that it comes after.
        marks: where its copies end; the job adds its own.
        job: the disk's part; None if it has none.
    """

    def __init__(
        self, streams: Streams[EventT], direction: Direction, key: object, after: Mark[EventT]
    ) -> None:
        self.direction = direction
        self.key = key
        self.after = after
        self.begun: Mark[EventT] | None = None
        self.marks: list[Mark[EventT]] = []
        self.job: Move | None = None
        self._streams = streams
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether it does not touch memory any more, and never will again."""
        if not self._is_over and (self.job is None or self.job.is_over):
            self._is_over = all(map(self._streams.is_reached, self.marks))
        return self._is_over

    def check(self) -> None:
        """Raise what the disk's part raised, if it did."""
        if self.job is not None:
            self.job.check()


class StreamMover(Mover[StreamMove[EventT]]):
    """Copies between a device with streams, pinned host memory and the disk.

    Args:
        streams: of the device.
        bounce_bytes: size of each of four pinned buffers; at least one block.

    Attributes:
        up_s: seconds that copies of host memory to the device took, of those that are over.
        down_s: likewise, from the device.
    """

    def __init__(self, streams: Streams[EventT], bounce_bytes: int) -> None:
        super().__init__()
        self.up_s = 0.0
        self.down_s = 0.0
        self._streams = streams
        self._bounce_bytes = bounce_bytes
        self._bounces: dict[Direction, Bounce[EventT]] = {}
        self._queue = MoveQueue(QUEUE_CAPACITY)
        if (log := active_log()) is not None:
            log.has_streams()
        self._moves: list[StreamMove[EventT]] = []
        self._joinable: dict[object, StreamMove[EventT]] = {}
        weakref.finalize(self, self._queue.stop)

    @property
    def num_bytes(self) -> int:  # noqa: D102
        return self._queue.num_bytes + sum(each.num_bytes for each in self._bounces.values())

    @property
    def peak_bytes(self) -> int:  # noqa: D102
        return self._queue.peak_bytes + sum(each.num_bytes for each in self._bounces.values())

    def load(  # noqa: D102
        self,
        homes: Homes,
        arena: DeviceArena,
        slots: Places,
        places: Places,
        *,
        priority: Priority = Priority.DEMAND,
    ) -> StreamMove[EventT]:
        return self._submit(
            Direction.UP, Guard.LOAD_AFTER_READ, homes, arena, slots, places, priority
        )

    def store(  # noqa: D102
        self,
        homes: Homes,
        arena: DeviceArena,
        slots: Places,
        places: Places,
        *,
        priority: Priority = Priority.WRITE_DOWN,
    ) -> StreamMove[EventT]:
        return self._submit(
            Direction.DOWN, Guard.STORE_AFTER_WRITE, homes, arena, slots, places, priority
        )

    def join(self, move: StreamMove[EventT]) -> None:  # noqa: D102
        if move.job is not None:
            self._queue.join(move.job, Priority.DEMAND)

    def wait(self, move: StreamMove[EventT], guard: Guard) -> None:
        """Let compute go on only after a move; the host waits for the disk's part only."""
        # Its slots may be given to another move from now on: nobody may join this one any more.
        self._joinable.pop(move.key, None)
        if move.job is not None:
            start = time.perf_counter()
            try:
                self._queue.wait(move.job)
            finally:
                self.stall_s += time.perf_counter() - start
        for mark in move.marks:
            self.fence(StreamName.COMPUTE, mark, guard)

    def fence(self, stream: StreamName, mark: Mark[EventT], guard: Guard) -> None:
        """Let a stream go on only after a mark; every wait on the device is made here."""
        del guard  # for the reader, and for tests that leave one out
        self._streams.wait(stream, mark)

    def finish(self, mark: Mark[EventT], guard: Guard) -> None:
        """Block the calling thread until a mark; every such wait is made here."""
        del guard  # likewise
        self._streams.synchronize(mark)

    def cancel(self, move: StreamMove[EventT]) -> None:  # noqa: D102
        # What was given to a stream cannot be taken back; a job can, while it waits.
        if move.job is None or self._queue.cancel(move.job):
            for mark in move.marks:
                self.fence(StreamName.COMPUTE, mark, Guard.REUSE_AFTER_CANCEL)
            self._joinable.pop(move.key, None)
        else:
            self.wait(move, Guard.REUSE_AFTER_CANCEL)

    def quiesce(self) -> None:
        """Drop every job that waits; return when no thread and no stream copies any more."""
        for job in self._queue.drop_waiting():
            self._queue.wait(job)
        for move in self._moves:
            for mark in move.marks:
                self.finish(mark, Guard.FREE_AFTER_MOVES)
        self._reap()

    def pin(self, memory: torch.Tensor) -> None:  # noqa: D102
        self._streams.pin(memory)

    def unpin(self, memory: torch.Tensor) -> None:  # noqa: D102
        self._streams.unpin(memory)

    def close(self) -> None:  # noqa: D102
        self.quiesce()
        self._queue.close()
        for bounce in self._bounces.values():
            bounce.close()
        self._bounces.clear()
        self._streams.close()

    # ---- one move

    def _submit(
        self,
        direction: Direction,
        guard: Guard,
        homes: Homes,
        arena: DeviceArena,
        slots: Places,
        places: Places,
        priority: Priority,
    ) -> StreamMove[EventT]:
        self._reap()
        key = move_key(direction, homes, arena, slots, places)
        found = self._joinable.get(key)
        if found is not None:
            self.join(found)
            return found
        stream = _STREAM_OF[direction]
        # Everything that compute was given so far: it wrote what a store reads, and read what a
        # load overwrites.
        move = StreamMove(self._streams, direction, key, self._streams.mark(StreamName.COMPUTE))
        self.fence(stream, move.after, guard)
        in_host = homes.in_host(places)
        if in_host.any():
            move.begun = self._streams.mark(stream)
            for at, home, count in _runs(slots[in_host], places[in_host]):
                in_slots = arena.raw[at : at + count]
                in_homes = homes.host_memory[home : home + count]
                if direction is Direction.UP:
                    self._streams.copy(stream, in_slots, in_homes)
                else:
                    self._streams.copy(stream, in_homes, in_slots)
            move.marks.append(self._streams.mark(stream))
        if not in_host.all():
            run: Callable[..., None] = (
                self._from_disk if direction is Direction.UP else self._to_disk
            )
            extents = homes.extents(places[~in_host])
            if direction not in self._bounces:
                self._bounces[direction] = Bounce(self._streams, self._bounce_bytes, self.finish)
            move.job = self._queue.submit(
                partial(run, move, homes, arena, slots[~in_host], extents),
                direction,
                priority,
                key=("disk", key, id(move)),
                num_bytes=slots.nbytes + places.nbytes,
            )
        self._moves.append(move)
        self._joinable[key] = move
        return move

    def _from_disk(
        self,
        move: StreamMove[EventT],
        homes: Homes,
        arena: DeviceArena,
        slots: Places,
        extents: Places,
    ) -> None:
        """Read extents and give them to the UP stream. Runs on the thread for loads."""
        for part, half, memory in self._bounces[Direction.UP].batches(
            len(slots), arena.raw.shape[1]
        ):
            homes.read_extents(extents[part], memory)
            for at, first, count in _runs(slots[part], np.arange(len(memory), dtype=np.int32)):
                self._streams.copy(
                    StreamName.UP, arena.raw[at : at + count], memory[first : first + count]
                )
            half.in_use = self._streams.mark(StreamName.UP)
            move.marks.append(half.in_use)

    def _to_disk(
        self,
        move: StreamMove[EventT],
        homes: Homes,
        arena: DeviceArena,
        slots: Places,
        extents: Places,
    ) -> None:
        """Take slots from the DOWN stream and write them. Runs on the thread for stores."""
        for part, _, memory in self._bounces[Direction.DOWN].batches(
            len(slots), arena.raw.shape[1]
        ):
            for at, first, count in _runs(slots[part], np.arange(len(memory), dtype=np.int32)):
                self._streams.copy(
                    StreamName.DOWN, memory[first : first + count], arena.raw[at : at + count]
                )
            mark = self._streams.mark(StreamName.DOWN)
            move.marks.append(mark)
            self.finish(mark, Guard.WRITE_AFTER_COPY)
            homes.write_extents(extents[part], memory)

    def _reap(self) -> None:
        """Forget moves that are over, and use their events again."""
        left = []
        for move in self._moves:
            if not move.is_over:
                left.append(move)
                continue
            if self._joinable.get(move.key) is move:
                del self._joinable[move.key]
            if move.begun is not None:
                seconds = self._streams.seconds_between(move.begun, move.marks[0])
                if move.direction is Direction.UP:
                    self.up_s += seconds
                else:
                    self.down_s += seconds
        self._moves = left


def _runs(slots: Places, homes: Places) -> Iterator[tuple[int, int, int]]:
    """Cut two lists of places into runs that are neighbours in both: first, first, how many."""
    if not len(slots):
        return
    ends = np.flatnonzero((np.diff(slots) != 1) | (np.diff(homes) != 1)) + 1
    starts = np.concatenate([[0], ends])
    for start, end in zip(starts, np.append(ends, len(slots)), strict=True):
        yield int(slots[start]), int(homes[start]), int(end - start)
