"""Carries blocks between the device arena and their homes, on threads of its own.

The main thread computes and decides; the two threads here only copy bytes. One loads, one stores:
a demand load never waits behind a store. Every wait in this file says which read or write it
protects.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from specoffload.tiers.device import DeviceArena
from specoffload.tiers.disk import SpillFile
from specoffload.tiers.host import HostArena

Places = npt.NDArray[np.int32]


class Homes:
    """Where blocks lie below the device: host slots `[0, n)`, then extents of a spill file.

    Args:
        host: the host arena; may have no slots.
        spill: the spill file; None where there is no disk tier.
    """

    def __init__(self, host: HostArena, spill: SpillFile | None) -> None:
        self._host = host
        self._spill = spill

    @property
    def host_bytes(self) -> int:
        """Bytes of the host arena."""
        return self._host.num_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the spill file."""
        return 0 if self._spill is None else self._spill.num_bytes

    def write(self, arena: DeviceArena, slots: Places, homes: Places) -> None:
        """Copy slots to homes. Runs on the store thread; raises `SpillError`."""
        buffers = arena.slot_bytes
        num_host = len(self._host.slot_bytes)
        in_host = homes < num_host
        for slot, home in zip(slots[in_host], homes[in_host], strict=True):
            self._host.slot_bytes[home] = buffers[slot]
        if not in_host.all():
            assert self._spill is not None
            blocks = [buffers[slot] for slot in slots[~in_host]]
            self._spill.write(homes[~in_host] - num_host, blocks)

    def read(self, arena: DeviceArena, slots: Places, homes: Places) -> None:
        """Copy homes to slots. Runs on the load thread; raises `SpillError`."""
        buffers = arena.slot_bytes
        num_host = len(self._host.slot_bytes)
        in_host = homes < num_host
        for slot, home in zip(slots[in_host], homes[in_host], strict=True):
            buffers[slot] = self._host.slot_bytes[home]
        if not in_host.all():
            assert self._spill is not None
            blocks = [buffers[slot] for slot in slots[~in_host]]
            self._spill.read(homes[~in_host] - num_host, blocks)

    def close(self) -> None:
        """Give host memory and disk space back. Precondition: no move is in flight."""
        self._host = HostArena(0, 0)
        if self._spill is not None:
            self._spill.close()


class Mover:
    """One thread that loads and one that stores, started when first needed.

    Attributes:
        stall_s: seconds that the main thread spent waiting for either.
    """

    def __init__(self) -> None:
        self.stall_s = 0.0
        self._unfinished: set[Future[None]] = set()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="specoffload-load")
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="specoffload-store")

    def load(self, homes: Homes, arena: DeviceArena, slots: Places, places: Places) -> Future[None]:
        """Start copying homes into slots.

        The caller keeps the slots from every other use until the future is done: the load writes
        them until then.
        """
        return self._watched(self._loader.submit(homes.read, arena, slots, places))

    def store(
        self, homes: Homes, arena: DeviceArena, slots: Places, places: Places
    ) -> Future[None]:
        """Start copying slots into homes.

        The slots were written by the main thread before this call, and submitting orders that write
        before the store's read. The caller keeps them from reuse until the future is done.
        """
        return self._watched(self._storer.submit(homes.write, arena, slots, places))

    def wait(self, future: Future[None]) -> None:
        """Return when a move is done, counting the wait as a stall; raise what it raised.

        Orders the move's writes before whatever the caller reads next.
        """
        if not future.done():
            start = time.perf_counter()
            try:
                future.exception()
            finally:
                self.stall_s += time.perf_counter() - start
        future.result()

    def quiesce(self) -> None:
        """Drop every move that waits and return when none runs; how they went no longer matters.

        Protects arenas and homes from moves that nobody waits for any more, before they are reused.
        """
        for future in tuple(self._unfinished):
            future.cancel()
        for future in tuple(self._unfinished):
            if not future.cancelled():
                future.exception()

    def _watched(self, future: Future[None]) -> Future[None]:
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future

    def close(self) -> None:
        """Finish what runs, drop what waits, end both threads. Idempotent."""
        self._loader.shutdown(wait=True, cancel_futures=True)
        self._storer.shutdown(wait=True, cancel_futures=True)
