"""Streams absent blocks past the attention: in layer order, half of the staging area at a time.

Knows which blocks a pass will need and in what order. Refuses to know what is computed with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from specoffload.tiers.pool import BlockPool


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Absent blocks of one layer that fit one half of the staging area."""

    layer: int
    rows: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int32]
    homes: npt.NDArray[np.int32]


class Stream:
    """Brings a pass's absent blocks through the two halves of the staging area, in layer order."""

    def __init__(self, pool: BlockPool, rows: npt.NDArray[np.int64], num_blocks: int) -> None:
        self._pool = pool
        self._num_rows = len(rows)
        self._num_blocks = num_blocks
        self._chunks = list(self._plan(rows)) if pool.is_offloading else []
        self._next = 0
        self._loads: deque[Future[None]] = deque()
        self._submit()
        self._submit()

    def tables(self, layer: int) -> Iterator[torch.Tensor]:
        """Yield a block table `[B, N]` for each chunk of a layer, while it lies in staging."""
        while self._next - len(self._loads) < len(self._chunks):
            chunk = self._chunks[self._next - len(self._loads)]
            if chunk.layer != layer:
                break
            # Protects the staging slots' new contents from being read before the load wrote them.
            self._pool.mover.wait(self._loads[0])
            table_BN = np.full((self._num_rows, self._num_blocks), -1, np.int32)
            table_BN[chunk.rows, chunk.blocks] = chunk.slots
            yield torch.from_numpy(table_BN)
            # The reader is done with this half: only now may the next load write it.
            self._loads.popleft()
            self._pool.counters.bytes_up += len(chunk.slots) * self._pool.shape.block_bytes
            self._submit()

    def close(self) -> None:
        """Stop; return when no load writes the staging slots any more."""
        for future in self._loads:
            if not future.cancel():
                future.exception()
        self._loads.clear()
        self._chunks = []

    def _plan(self, rows: npt.NDArray[np.int64]) -> Iterator[Chunk]:
        pool = self._pool
        half = len(pool.staging) // 2
        residency = pool.residency
        absent = residency.stored & (residency.slot < 0)
        parity = 0
        for layer in range(pool.shape.num_layers):
            row, block = np.nonzero(absent[layer, rows, : self._num_blocks])
            for start in range(0, len(row), half):
                part = slice(start, start + half)
                count = len(row[part])
                yield Chunk(
                    layer=layer,
                    rows=row[part],
                    blocks=block[part],
                    slots=pool.staging[parity * half : parity * half + count],
                    homes=residency.home[layer, rows[row[part]], block[part]],
                )
                parity ^= 1

    def _submit(self) -> None:
        if self._next < len(self._chunks):
            chunk = self._chunks[self._next]
            pool = self._pool
            self._loads.append(pool.mover.load(pool.homes, pool.arena, chunk.slots, chunk.homes))
            self._next += 1
