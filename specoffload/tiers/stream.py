"""Streams absent blocks past the attention: in layer order, half of the staging area at a time.

Knows which blocks a pass will need and in what order. Refuses to know what is computed with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from specoffload.tiers.access import Guard
from specoffload.tiers.transfer import AnyMove

if TYPE_CHECKING:
    from specoffload.tiers.pool import BlockPool


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Absent blocks of one layer that are read together, and the slots that they will be in.

    Attributes:
        homes: where they are loaded from; None if a move in flight brings them.
        move: that move.
    """

    layer: int
    rows: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int32]
    homes: npt.NDArray[np.int32] | None = None
    move: AnyMove | None = None


class Stream:
    """Brings a pass's absent blocks through the two halves of the staging area, in layer order.

    Blocks that are on their way to slots of their own are not loaded a second time: the pass joins
    the move that brings them.
    """

    def __init__(self, pool: BlockPool, rows: npt.NDArray[np.int64], num_blocks: int) -> None:
        self._pool = pool
        self._num_rows = len(rows)
        self._num_blocks = num_blocks
        staged = list(self._plan(rows)) if pool.is_offloading else []
        joined = list(self._joined(rows)) if pool.is_offloading else []
        # Within a layer what is on its way comes last; sorting is stable.
        self._chunks = deque(sorted([*staged, *joined], key=lambda chunk: chunk.layer))
        self._unsent = deque(staged)
        self._loads: deque[AnyMove] = deque()
        self._holds = [chunk.move for chunk in joined if chunk.move is not None]
        for move in self._holds:
            pool.mover.join(move)
        self._at = 0
        self._places: tuple[torch.Tensor, ...] = ()
        self._arrays: list[npt.NDArray[Any]] = []
        self._submit()
        self._submit()

    @property
    def places(self) -> list[npt.NDArray[Any]]:
        """Row, block and slot of every absent block, in the order in which they come."""
        if not self._chunks:
            return []
        return [
            np.concatenate([getattr(chunk, name) for chunk in self._chunks])
            for name in ("rows", "blocks", "slots")
        ]

    def place(self, *places: torch.Tensor) -> None:
        """Take the same, as tensors of the device; to be called before `tables`."""
        self._places = places
        self._arrays = [each.numpy() for each in places if each.device.type == "cpu"]

    def tables(self, layer: int) -> Iterator[torch.Tensor]:
        """Yield a block table `[B, N]` for each chunk of a layer, while its slots hold it."""
        while self._chunks and self._chunks[0].layer == layer:
            chunk = self._chunks[0]
            if chunk.move is None:
                move, guard = self._loads[0], Guard.READ_AFTER_LOAD
            else:
                move, guard = chunk.move, Guard.READ_AFTER_JOIN
            self._pool.mover.wait(move, guard)
            move.check()
            yield self._table(len(chunk.slots))
            self._chunks.popleft()
            self._at += len(chunk.slots)
            if chunk.move is None:
                # The reader is done with this half: only now may the next load write it.
                self._loads.popleft()
                self._pool.counters.bytes_up += len(chunk.slots) * self._pool.shape.block_bytes
                self._submit()

    def _table(self, count: int) -> torch.Tensor:
        """Return the block table of the next `count` blocks."""
        here = slice(self._at, self._at + count)
        shape = (self._num_rows, self._num_blocks)
        if self._arrays:
            return table_in_ram(shape, *(each[here] for each in self._arrays))
        return table_on_device(shape, *(each[here] for each in self._places))

    def close(self) -> None:
        """Stop; return when no load writes the staging slots any more. Idempotent."""
        for move in [*self._loads, *self._holds]:
            self._pool.mover.cancel(move)
        self._loads.clear()
        self._holds.clear()
        self._chunks.clear()
        self._unsent.clear()

    def _plan(self, rows: npt.NDArray[np.int64]) -> Iterator[Chunk]:
        pool = self._pool
        half = len(pool.staging) // 2
        residency = pool.residency
        absent = residency.stored & (residency.slot < 0) & ~residency.in_flight
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

    def _joined(self, rows: npt.NDArray[np.int64]) -> Iterator[Chunk]:
        shape = self._pool.residency.shape
        place = np.full(shape[1], -1)
        place[rows] = np.arange(len(rows))
        for ticket, move in self._pool.loads_in_flight():
            layer, row, block = np.unravel_index(ticket.units, shape)
            wanted = (place[row] >= 0) & (block < self._num_blocks)
            for each in np.unique(layer[wanted]):
                here = wanted & (layer == each)
                yield Chunk(
                    layer=int(each),
                    rows=place[row[here]],
                    blocks=block[here],
                    slots=ticket.slots[here],
                    move=move,
                )

    def _submit(self) -> None:
        if self._unsent:
            chunk = self._unsent.popleft()
            assert chunk.homes is not None
            pool = self._pool
            self._loads.append(pool.mover.load(pool.homes, pool.arena, chunk.slots, chunk.homes))


def table_in_ram(
    shape: tuple[int, int],
    rows: npt.NDArray[np.int64],
    blocks: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int32],
) -> torch.Tensor:
    """Return an int32 table `[B, N]` with each slot in its place, and -1 elsewhere.

    numpy takes a quarter of the time that torch takes for so little.
    """
    table_BN = np.full(shape, -1, np.int32)
    table_BN[rows, blocks] = slots
    return torch.from_numpy(table_BN)


def table_on_device(
    shape: tuple[int, int], rows: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Return the same table where the tensors are, without the host waiting for anything."""
    table_BN = torch.full(shape, -1, dtype=torch.int32, device=slots.device)
    table_BN[rows, blocks] = slots
    return table_BN
