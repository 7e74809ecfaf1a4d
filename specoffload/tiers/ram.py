"""RAM for arenas: page-aligned, in huge pages where the kernel gives them."""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import numpy as np
import torch

from specoffload.tiers.access import MEMORY, Span

PAGE: Final = mmap.PAGESIZE
"""Bytes of a page: what direct I/O moves, and what memory is pinned by."""

_HUGE_PAGE = 2 << 20


def allocate(num_bytes: int) -> torch.Tensor:
    """Return `num_bytes` zeroed bytes that start at a page, as a CPU tensor.

    From 2 MiB on, huge pages are asked for: attention reads an arena from end to end, and the
    processor's address tables cover only a few megabytes of small pages. Where the kernel has none
    to give, the pages are small and everything else is the same.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    spare = _HUGE_PAGE if num_bytes >= _HUGE_PAGE else 0
    memory = mmap.mmap(-1, num_bytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if spare:
        with contextlib.suppress(OSError):  # only advice
            memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive.
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    start = -buffer.data_ptr() % _HUGE_PAGE if spare else 0
    return buffer[start : start + num_bytes]


def span_of(memory: torch.Tensor) -> Span:
    """Return where contiguous memory of any device lies, for the record of accesses."""
    size = memory.numel() * memory.element_size()
    return Span(space=MEMORY, starts=np.array([memory.data_ptr()]), size=size)
