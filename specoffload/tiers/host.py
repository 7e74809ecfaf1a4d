"""The host tier: one arena of raw blocks in RAM, allocated once a call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

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
    """Host slots for blocks of one size, as bytes `[host_slot, byte]`."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.slot_bytes: npt.NDArray[np.uint8] = (
            ram.allocate(num_slots * block_bytes).view(num_slots, block_bytes).numpy()
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena."""
        return self.slot_bytes.nbytes

    def span(self, slots: npt.NDArray[np.int32]) -> Span:
        """Return the memory of some host slots, for the record of accesses."""
        size = self.slot_bytes.shape[1]
        starts = self.slot_bytes.ctypes.data + slots.astype(np.int64) * size
        return Span(space=MEMORY, starts=starts, size=size)


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
