"""Pinned buffers between the disk and a device: a block passes through one in either direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic

import torch

from specoffload.tiers import ram
from specoffload.tiers.access import Guard, active_log
from specoffload.tiers.streams import EventT, Mark, Streams


@dataclass(eq=False)
class Half(Generic[EventT]):
    """One of two buffers that take turns.

    Attributes:
        memory: its bytes.
        in_use: when the last copy out of it is done; None: there is none.
    """

    memory: torch.Tensor
    in_use: Mark[EventT] | None = None


class Bounce(Generic[EventT]):
    """Two halves that take turns, so that one is copied while the disk works on the other.

    Belongs to one thread.

    Args:
        streams: whose copies use it.
        half_bytes: size of a half; at least one block.
        finish: blocks the calling thread until a mark, for the sake of a guard.
    """

    def __init__(
        self,
        streams: Streams[EventT],
        half_bytes: int,
        finish: Callable[[Mark[EventT], Guard], None],
    ) -> None:
        self._streams = streams
        self._finish = finish
        self._log = active_log()
        self._memory = ram.allocate(2 * half_bytes)
        streams.pin(self._memory)
        self._halves: list[Half[EventT]] = [
            Half(self._memory[:half_bytes]),
            Half(self._memory[half_bytes:]),
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of both halves."""
        return self._memory.numel()

    def batches(
        self, count: int, block_bytes: int
    ) -> Iterator[tuple[slice, Half[EventT], torch.Tensor]]:
        """Cut `count` blocks into batches that fit a half, and give each batch one.

        Yields:
            Which blocks, the half, and the part of its memory for them, `[n, block_bytes]`.
        """
        per_half = self._halves[0].memory.numel() // block_bytes
        assert per_half, "a block does not fit"
        for start in range(0, count, per_half):
            half = self._halves[0]
            self._halves.reverse()
            part = slice(start, min(count, start + per_half))
            self._reuse(half)
            size = (part.stop - part.start) * block_bytes
            yield part, half, half.memory[:size].view(-1, block_bytes)
            if self._log is not None:
                self._log.release(self)

    def close(self) -> None:
        """Give the memory back. Precondition: no copy uses it. Idempotent."""
        self._streams.unpin(self._memory)
        self._memory = self._memory[:0]
        self._halves = []

    def _reuse(self, half: Half[EventT]) -> None:
        if self._log is not None:
            self._log.acquire(self)  # one move uses it after another: they run on one thread
        if half.in_use is not None:
            self._finish(half.in_use, Guard.FILL_AFTER_COPY)
            half.in_use = None
