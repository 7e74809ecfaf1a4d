"""The host tier: arenas of raw blocks in RAM, laid out in one buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from specoffload.tiers import ram
from specoffload.tiers.access import MEMORY, Span

_CGROUP = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


class HostArena:
    """Host slots for blocks of one size.

    Args:
        num_slots: how many.
        block_bytes: bytes of each.
        memory: the bytes to lay them out in; new ones if None.

    Attributes:
        tensor: the arena as raw bytes, `[host_slot, byte]`.
    """

    def __init__(
        self, num_slots: int, block_bytes: int, memory: torch.Tensor | None = None
    ) -> None:
        if memory is None:
            memory = ram.allocate(num_slots * block_bytes)
        self.tensor = memory.view(num_slots, block_bytes)

    @property
    def slot_bytes(self) -> npt.NDArray[np.uint8]:
        """The arena as an array that shares its memory."""
        return self.tensor.numpy()

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena."""
        return self.tensor.numel()

    def span(self, slots: npt.NDArray[np.int32]) -> Span:
        """Return the memory of some host slots, for the record of accesses."""
        size = self.tensor.shape[1]
        starts = self.tensor.data_ptr() + slots.astype(np.int64) * size
        return Span(space=MEMORY, starts=starts, size=size)


class HostMemory:
    """The one buffer behind all host arenas of a runner; it grows between calls.

    Args:
        pin: prepares it for copies; called once for every buffer.
        unpin: undoes that.
        keeps: whether it stays allocated between calls, because preparing it takes long.
    """

    def __init__(
        self,
        *,
        pin: Callable[[torch.Tensor], None],
        unpin: Callable[[torch.Tensor], None],
        keeps: bool,
    ) -> None:
        self._pin = pin
        self._unpin = unpin
        self._keeps = keeps
        self._buffer = ram.allocate(0)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated now."""
        return self._buffer.numel()

    def carve(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return one byte view for each size; no two overlap; earlier ones become invalid.

        Precondition: no move is in flight.
        """
        if self.num_bytes < sum(sizes):
            self.release()
            buffer = ram.allocate(sum(sizes))
            self._pin(buffer)
            self._buffer = buffer
        starts = np.cumsum([0, *sizes])
        return [
            self._buffer[start : start + size]
            for start, size in zip(starts[:-1].tolist(), sizes, strict=True)
        ]

    def end_call(self) -> None:
        """Give the memory back unless it is worth keeping. Precondition as above."""
        if not self._keeps:
            self.release()

    def release(self) -> None:
        """Give the memory back. Precondition as above."""
        self._unpin(self._buffer)
        self._buffer = ram.allocate(0)


def available_host_bytes() -> int:
    """Return the memory that this process may still take: the machine's or its container's."""
    free = _meminfo("MemAvailable")
    for limit_file, used_file in _CGROUP:
        try:
            limit = int(limit_file.read_text())
            used = int(used_file.read_text())
        except (OSError, ValueError):  # no such controller, or "max": no limit
            continue
        free = min(free, max(0, limit - used))
    return free


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {key}")
