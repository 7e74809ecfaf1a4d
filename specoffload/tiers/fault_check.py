"""A check of the spill path on this machine: every fault must surface as the right error.

Knows what must happen when a disk goes wrong. Refuses to repair anything.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from specoffload.errors import CorruptBlockError, SpillError
from specoffload.tiers.access import Guard
from specoffload.tiers.device import DeviceArena, DeviceMemory, KVShape
from specoffload.tiers.disk import SpillFile
from specoffload.tiers.faults import Fault, FaultKind, FaultyCalls
from specoffload.tiers.homes import Homes, Places
from specoffload.tiers.host import HostArena
from specoffload.tiers.move import Move
from specoffload.tiers.transfer import ThreadMover

_NUM_BLOCKS: Final = 4
_SHAPE: Final = KVShape(
    num_layers=1, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32, windows=(None,)
)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A fault, and what whoever waits for the move must get; None: the right bytes."""

    name: str
    fault: Fault
    error: int | None = None
    is_corrupt: bool = False


_CASES: Final = (
    _Case(name="slow read", fault=Fault(verb="read", kind=FaultKind.DELAY, delay_s=0.01)),
    _Case(name="slow write", fault=Fault(verb="write", kind=FaultKind.DELAY, delay_s=0.01)),
    _Case(name="short read", fault=Fault(verb="read", kind=FaultKind.SHORT, num_bytes=5000)),
    _Case(name="short write", fault=Fault(verb="write", kind=FaultKind.SHORT, num_bytes=5000)),
    _Case(
        name="file cut off",
        fault=Fault(verb="read", kind=FaultKind.NOTHING),
        error=errno.EIO,
    ),
    _Case(
        name="read error",
        fault=Fault(verb="read", kind=FaultKind.IO_ERROR),
        error=errno.EIO,
    ),
    _Case(
        name="write error",
        fault=Fault(verb="write", kind=FaultKind.IO_ERROR),
        error=errno.EIO,
    ),
    _Case(
        name="full disk",
        fault=Fault(verb="write", kind=FaultKind.NO_SPACE),
        error=errno.ENOSPC,
    ),
    _Case(
        name="bit flipped when read",
        fault=Fault(verb="read", kind=FaultKind.FLIP),
        error=errno.EIO,
        is_corrupt=True,
    ),
    _Case(
        name="bit flipped when written",
        fault=Fault(verb="write", kind=FaultKind.FLIP),
        error=errno.EIO,
        is_corrupt=True,
    ),
)


def check_faults(folder: Path, *, direct: bool = False) -> Iterator[tuple[str, str | None]]:
    """Store and load blocks in a folder under each fault in turn.

    Args:
        folder: where a spill file can lie.
        direct: go past the page cache.

    Yields:
        The name of a fault, and what was wrong with its outcome; None if nothing was.

    Raises:
        SpillError: the folder cannot hold a spill file.
    """
    calls = FaultyCalls()
    with ExitStack() as stack:
        spill = SpillFile(folder, _SHAPE.block_bytes, _NUM_BLOCKS, direct=direct, calls=calls)
        homes = Homes(HostArena(0, _SHAPE.block_bytes), spill)
        stack.callback(homes.close)
        mover = ThreadMover()
        stack.callback(mover.close)
        (memory,) = DeviceMemory(torch.device("cpu"), None).carve(
            [2 * _NUM_BLOCKS * _SHAPE.block_bytes]
        )
        arena = DeviceArena(_SHAPE, memory, 2 * _NUM_BLOCKS)
        trip = _RoundTrip(mover, homes, arena)
        for number, case in enumerate(_CASES):
            calls.inject(case.fault)
            outcome = trip.run(seed=number)
            calls.inject()
            problem = _judge(case, outcome)
            if problem is None and (after := trip.run(seed=-number - 1)) is not None:
                problem = f"and after it a move without a fault fails: {after}"
            yield case.name, problem


def _judge(case: _Case, outcome: str | SpillError | None) -> str | None:
    """Return what is wrong with what came of a fault."""
    if isinstance(outcome, str) or case.error is None:
        return None if outcome is None else str(outcome)
    if outcome is None:
        return "not noticed"
    if outcome.errno != case.error:
        return f"reported as {errno.errorcode.get(outcome.errno or 0, outcome.errno)}: {outcome}"
    if isinstance(outcome, CorruptBlockError) is not case.is_corrupt:
        return f"reported as {type(outcome).__name__}: {outcome}"
    return None


class _RoundTrip:
    """Blocks that go down to the disk and come back to other slots."""

    def __init__(self, mover: ThreadMover, homes: Homes, arena: DeviceArena) -> None:
        self._mover = mover
        self._homes = homes
        self._arena = arena
        self._places: Places = np.arange(_NUM_BLOCKS, dtype=np.int32)

    def run(self, *, seed: int) -> str | SpillError | None:
        """Return the error that surfaced, or what is wrong with the bytes; None if all is well."""
        sent, received = self._places, self._places + np.int32(_NUM_BLOCKS)
        blocks = self._arena.slot_bytes
        blocks[sent] = np.random.default_rng(abs(seed)).integers(
            0, 256, (_NUM_BLOCKS, _SHAPE.block_bytes), np.uint8
        )
        blocks[received] = ~blocks[sent]
        try:
            self._finish(self._mover.store(self._homes, self._arena, sent, self._places))
            self._finish(self._mover.load(self._homes, self._arena, received, self._places))
        except SpillError as error:
            return error
        return None if (blocks[received] == blocks[sent]).all() else "other bytes came back"

    def _finish(self, move: Move) -> None:
        self._mover.wait(move, Guard.READ_AFTER_LOAD)
        move.check()
