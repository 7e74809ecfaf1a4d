"""Faults of a disk, made on purpose: what a spill file's system calls do when things go wrong.

Knows what a fault looks like from above. Refuses to know what should happen then.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from specoffload.tiers.file_calls import FileCalls
from specoffload.tiers.ram import PAGE, allocate

Verb: TypeAlias = Literal["read", "write"]


class FaultKind(Enum):
    """What happens to a call."""

    DELAY = "delay"
    """It takes `least_delay_s` to `delay_s` longer."""
    SHORT = "short"
    """It moves at most `num_bytes` bytes."""
    NOTHING = "nothing"
    """It moves nothing, as at the end of a file."""
    IO_ERROR = errno.EIO
    """It fails with EIO."""
    NO_SPACE = errno.ENOSPC
    """It fails with ENOSPC."""
    FLIP = "flipped bit"
    """One bit of its first buffer arrives as the other one."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Some calls of one kind that go wrong.

    Attributes:
        verb: which calls.
        kind: how.
        first: the first of these calls that it happens to, counted from 0.
        count: how many of them; None: all that follow.
        least_delay_s: shortest delay.
        delay_s: longest delay.
        num_bytes: most bytes of a short transfer.
    """

    verb: Verb
    kind: FaultKind
    first: int = 0
    count: int | None = None
    least_delay_s: float = 0.0
    delay_s: float = 0.0
    num_bytes: int = 1

    def happens_at(self, call: int) -> bool:
        """Whether the call of this number goes wrong."""
        end = float("inf") if self.count is None else self.first + self.count
        return self.first <= call < end


class FaultyCalls(FileCalls):
    """The real system calls, with faults.

    Args:
        faults: what goes wrong.
        seed: of the delays.

    Attributes:
        descriptors: the files that were opened, newest last.
    """

    def __init__(self, *faults: Fault, seed: int = 0) -> None:
        self.descriptors: list[int] = []
        self._direct: set[int] = set()
        self._random = random.Random(seed)
        self.inject(*faults)

    def inject(self, *faults: Fault) -> None:
        """Let these faults happen and no others; calls are counted from now on."""
        self._num_calls: Counter[Verb] = Counter()
        self._faults = faults

    def open_unnamed(self, folder: Path) -> int:
        """Open a file, and remember it."""
        self.descriptors.append(super().open_unnamed(folder))
        return self.descriptors[-1]

    def bypass_page_cache(self, fd: int) -> None:
        """Go past the page cache, and remember it."""
        super().bypass_page_cache(fd)
        self._direct.add(fd)

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Write, unless something goes wrong."""
        return self._transfer("write", super().write, fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Read, unless something goes wrong."""
        return self._transfer("read", super().read, fd, buffers, offset)

    def _transfer(
        self, verb: Verb, call: Callable[..., int], fd: int, buffers: Sequence[Any], offset: int
    ) -> int:
        number = self._num_calls[verb]
        self._num_calls[verb] += 1
        happening = [f for f in self._faults if f.verb == verb and f.happens_at(number)]
        flips, most = False, None
        for fault in happening:
            if fault.kind is FaultKind.DELAY:
                time.sleep(self._random.uniform(fault.least_delay_s, fault.delay_s))
            elif fault.kind is FaultKind.SHORT:
                most = fault.num_bytes
                # Past the page cache only whole pages can be asked for.
                asked = -(-most // PAGE) * PAGE if fd in self._direct else most
                buffers = _at_most(buffers, asked)
            elif fault.kind is FaultKind.NOTHING:
                return 0
            elif fault.kind is FaultKind.FLIP:
                flips = True
            else:
                raise OSError(fault.kind.value, os.strerror(fault.kind.value))
        if flips and verb == "write":
            buffers = [_flipped(buffers[0]), *buffers[1:]]
        moved = call(fd, buffers, offset)
        if flips and verb == "read":
            np.asarray(buffers[0])[:] = _flipped(buffers[0])
        return moved if most is None else min(moved, most)


def _at_most(buffers: Sequence[Any], num_bytes: int) -> list[Any]:
    """Cut a list of buffers off after so many bytes."""
    kept = []
    for buffer in buffers:
        if num_bytes <= 0:
            break
        kept.append(buffer[:num_bytes])
        num_bytes -= len(buffer)
    return kept


def _flipped(buffer: Any) -> Any:
    """Return a copy, aligned to a page as direct I/O wants it, with one bit changed."""
    copy = allocate(len(buffer)).numpy()
    copy[:] = buffer
    copy[len(copy) // 2] ^= 1
    return copy
