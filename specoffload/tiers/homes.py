"""Where blocks lie below the device, and the copies between there and the arena.

Knows places and bytes. Refuses to know when, or on which thread, a copy runs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from specoffload.tiers.access import Span, active_log
from specoffload.tiers.device import DeviceArena
from specoffload.tiers.disk import SpillFile
from specoffload.tiers.host import HostArena
from specoffload.tiers.ram import span_of
from specoffload_kernels import copy_blocks

Places = npt.NDArray[np.int32]


class Homes:
    """Host slots `[0, n)`, then extents of a spill file.

    Args:
        host: the host arena; may have no slots.
        spill: the spill file; None where there is no disk tier.
    """

    def __init__(self, host: HostArena, spill: SpillFile | None) -> None:
        self._host = host
        self._spill = spill
        self._log = active_log()

    @property
    def host_bytes(self) -> int:
        """Bytes of the host arena."""
        return self._host.num_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the spill file."""
        return 0 if self._spill is None else self._spill.num_bytes

    def in_host(self, homes: Places) -> npt.NDArray[np.bool_]:
        """Say which of some homes lie in host memory."""
        return homes < len(self._host.slot_bytes)

    def extents(self, homes: Places) -> Places:
        """Return the extents of the spill file that some homes are."""
        return homes - np.int32(len(self._host.slot_bytes))

    @property
    def host_memory(self) -> torch.Tensor:
        """The host arena as raw bytes, `[host_slot, byte]`."""
        return self._host.tensor

    def write_extents(self, extents: Places, blocks: torch.Tensor) -> None:
        """Write blocks `[n, byte]` to extents; raises `SpillError`."""
        assert self._spill is not None
        if self._log is not None:
            self._log.read(span_of(blocks))
            self._log.write(self._spill.span(extents))
        self._spill.write(extents, list(blocks.numpy()))

    def read_extents(self, extents: Places, blocks: torch.Tensor) -> None:
        """Read extents into blocks `[n, byte]`; raises `SpillError`."""
        assert self._spill is not None
        if self._log is not None:
            self._log.read(self._spill.span(extents))
            self._log.write(span_of(blocks))
        self._spill.read(extents, list(blocks.numpy()))

    def write(self, arena: DeviceArena, slots: Places, homes: Places) -> None:
        """Copy slots to homes; raises `SpillError`."""
        if self._log is not None:
            self._log.read(arena.span(slots))
            self._record(homes, self._log.write)
        buffers = arena.slot_bytes
        in_host = self.in_host(homes)
        if in_host.any():
            copy_blocks(self._host.slot_bytes, homes[in_host], buffers, slots[in_host])
        if not in_host.all():
            assert self._spill is not None
            blocks = [buffers[slot] for slot in slots[~in_host]]
            self._spill.write(self.extents(homes[~in_host]), blocks)

    def read(self, arena: DeviceArena, slots: Places, homes: Places) -> None:
        """Copy homes to slots; raises `SpillError`."""
        if self._log is not None:
            self._record(homes, self._log.read)
            self._log.write(arena.span(slots))
        buffers = arena.slot_bytes
        in_host = self.in_host(homes)
        if in_host.any():
            copy_blocks(buffers, slots[in_host], self._host.slot_bytes, homes[in_host])
        if not in_host.all():
            assert self._spill is not None
            blocks = [buffers[slot] for slot in slots[~in_host]]
            self._spill.read(self.extents(homes[~in_host]), blocks)

    def close(self) -> None:
        """Give host memory and disk space back. Precondition: no move is in flight."""
        self._host = HostArena(0, 0)
        if self._spill is not None:
            self._spill.close()

    def _record(self, homes: Places, note: Callable[[Span], None]) -> None:
        in_host = self.in_host(homes)
        note(self._host.span(homes[in_host]))
        if self._spill is not None:
            note(self._spill.span(self.extents(homes[~in_host])))
