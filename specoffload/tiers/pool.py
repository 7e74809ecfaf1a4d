"""One model's paged KV: its arena, its table and its moves.

Knows blocks, rows and budgets, and no models. Blocks on the device are attended in place; the
others stream through the staging slots in layer order (`stream.py`), and the parts are merged by
log-sum-exp (`forward.py`). So attention is exact at any budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specoffload.core.budget import Share, span_blocks
from specoffload.core.ledger import Ledger
from specoffload.core.policy import lru
from specoffload.core.residency import MoveKind, NoRoomError, Residency, Ticket, Units
from specoffload.tiers.access import Guard
from specoffload.tiers.device import DeviceArena, DeviceMemory, KVShape
from specoffload.tiers.forward import ForwardPass
from specoffload.tiers.homes import Homes
from specoffload.tiers.move import Priority
from specoffload.tiers.transfer import AnyMove, Mover

_STORE_BATCH = 64
"""Blocks in one store: large enough to be one system call, small enough to free slots soon."""


@dataclass(kw_only=True)
class PoolCounters:
    """What a pool moved since it was made. Sizes in bytes."""

    bytes_up: int = 0
    bytes_down: int = 0
    blocks_filled: int = 0
    blocks_written: int = 0


class BlockPool:
    """The KV of all rows of one model in one call.

    Args:
        shape: what a block looks like.
        device: the device tier, told of what is used.
        memory: bytes of it, for slots, staging and slots on loan.
        share: how many places there are in each tier.
        num_rows: sequences of the call.
        num_blocks: most blocks that a row can have in a layer.
        homes: where blocks lie below the device.
        mover: the threads that carry them.
        poison: fill free slots with NaN.
    """

    def __init__(
        self,
        shape: KVShape,
        device: DeviceMemory,
        memory: torch.Tensor,
        share: Share,
        *,
        num_rows: int,
        num_blocks: int,
        homes: Homes,
        mover: Mover[Any],
        poison: bool = False,
    ) -> None:
        self.shape = shape
        self.ledger = Ledger(num_rows)
        self.counters = PoolCounters()
        first_lent = share.num_slots + share.num_staging
        self._lent = np.arange(first_lent, first_lent + share.num_lent, dtype=np.int32)
        self._device = device
        self.residency = Residency(
            num_layers=shape.num_layers,
            num_rows=num_rows,
            num_blocks=num_blocks,
            num_slots=np.concatenate([np.arange(share.num_slots, dtype=np.int32), self._lent]),
            num_host_slots=share.num_host_slots,
            num_extents=share.num_extents,
        )
        self.arena = DeviceArena(shape, memory, first_lent + share.num_lent, poison=poison)
        self.homes = homes
        self.mover = mover
        self.staging = np.arange(
            share.num_slots, share.num_slots + share.num_staging, dtype=np.int32
        )
        self._layers = np.arange(shape.num_layers)
        self._num_blocks = np.zeros(num_rows, np.int64)
        self._num_sealed = np.zeros(num_rows, np.int64)
        # First block of each layer and row that its sliding window may still reach.
        self._first_block = np.zeros((shape.num_layers, num_rows), np.int64)
        # Rows with blocks that left their window while they were in flight.
        self._overdue: set[int] = set()
        self._round = 0
        self._moves: deque[tuple[Ticket, AnyMove]] = deque()

    @property
    def is_offloading(self) -> bool:
        """Whether blocks may have to leave the device; where all fit, nothing is ever copied."""
        return len(self.staging) > 0

    # ---- a forward pass

    def begin(
        self, rows: Sequence[int], num_new: Sequence[int], num_queries: int, *, with_signal: bool
    ) -> ForwardPass:
        """Make room for new tokens of some rows, and start streaming what the pass will need.

        Args:
            rows: the rows of the batch, in its order.
            num_new: tokens that each row really gets; the rest of its queries are padding.
            num_queries: query tokens of every row.
            with_signal: keep the log-sum-exp of every block.

        Raises:
            SpillError: a move failed; nothing was begun.
        """
        row = np.asarray(rows, np.int64)
        new = np.asarray(num_new, np.int64)
        block_size = self.shape.block_size
        frontier = self.ledger.frontier[row]
        wanted = -(-(frontier + new) // block_size)
        fresh = [
            self.residency.units(self._layers[:, None], r, np.arange(have, want)[None, :])
            for r, have, want in zip(row, self._num_blocks[row], wanted, strict=True)
            if want > have
        ]
        if fresh:
            units = np.concatenate(fresh)
            self._make_room(len(units))
            self.residency.claim(units)
        else:
            self._reap()
        self._num_blocks[row] = np.maximum(self._num_blocks[row], wanted)
        self._note_use()
        return ForwardPass(self, row, frontier, new, num_queries, with_signal=with_signal)

    def tokens_at_once(self, row: int, at_most: int) -> int:
        """Return how many tokens of a row one pass can take beside what the other rows need."""
        if not self.is_offloading:
            return at_most
        block_size = self.shape.block_size
        others = int((np.delete(self._num_blocks, row) > 0).sum())
        blocks = self.residency.num_slots // self.shape.num_layers - others
        tokens = (blocks - 1) * block_size + 1
        if tokens > block_size:
            tokens -= tokens % block_size
        return max(1, min(at_most, tokens))

    def fits(self, rows: Sequence[int], num_tokens: int) -> bool:
        """Say whether each of the rows can take as many tokens that stay provisional together."""
        if not self.is_offloading:
            return True
        others = int((np.delete(self._num_blocks, list(rows)) > 0).sum())
        blocks = len(rows) * span_blocks(num_tokens, self.shape.block_size) + others
        return blocks * self.shape.num_layers <= self.residency.num_slots

    def return_lent(self) -> None:
        """Give the slots on loan back: blocks in them leave, the least recently used first.

        Raises:
            SpillError: a move failed.
        """
        if not len(self._lent):
            return
        self._finish_moves()
        left = self.residency.num_slots - len(self._lent)
        held = self.residency.num_slots - self.residency.num_free_slots
        if held > left:
            units = lru.victims(self.residency, self.residency.demotable(), held - left)
            self.arena.freed(self.residency.demote(units))
        source, target = self.residency.retire_slots(self._lent)
        self.arena.copy(source, target)
        self.arena.freed(self._lent)
        self._lent = self._lent[:0]
        self._note_use()

    def settle(self, row: int, num_accepted: int) -> None:
        """Commit the first `num_accepted` provisional tokens of a row and roll the others back."""
        self.ledger.commit(row, num_accepted)
        self.ledger.rollback(row)
        committed = int(self.ledger.committed[row])
        block_size = self.shape.block_size
        keep = -(-committed // block_size)
        if self._num_blocks[row] > keep:
            self._drop(self._units_of(row, keep, int(self._num_blocks[row])))
            self._num_blocks[row] = keep
        full = committed // block_size
        if full > self._num_sealed[row]:
            units = self._units_of(row, int(self._num_sealed[row]), full)
            self.residency.seal(units)
            self.counters.blocks_filled += len(units)
            self._num_sealed[row] = full
        if keep:
            self.residency.touch(self._units_of(row, 0, keep), self._round)
        self._leave_windows(row, committed)

    def end_round(self) -> None:
        """Write down what became full, and bring back what there is room for.

        Raises:
            SpillError: an earlier move failed.
        """
        self._round += 1
        if not self.is_offloading:
            return
        self._reap()
        self._drop_overdue()
        self._write_down()
        self._promote()

    def release(self, row: int) -> None:
        """Forget a row.

        Raises:
            SpillError: a move failed; the row is forgotten all the same.
        """
        try:
            self._finish_moves()
        finally:
            self._drop(self._units_of(row, 0, int(self._num_blocks[row])))
            self._num_blocks[row] = 0
            self._num_sealed[row] = 0
            self._first_block[:, row] = 0
            self._overdue.discard(row)
            self.ledger.reset(row)

    def abandon(self) -> None:
        """Take back every move, and return when none is running; what failed no longer matters."""
        self.mover.quiesce()
        for ticket, _ in self._moves:
            self.residency.cancel(ticket)
        self._moves.clear()

    # ---- moves

    def loads_in_flight(self) -> Iterator[tuple[Ticket, AnyMove]]:
        """Yield the promotions that are not recorded as over yet."""
        return (pair for pair in self._moves if pair[0].kind is MoveKind.LOAD)

    def _units_of(self, row: int, first: int, end: int) -> Units:
        return self.residency.units(self._layers[:, None], row, np.arange(first, end)[None, :])

    def _note_use(self) -> None:
        held = self.residency.num_slots - self.residency.num_free_slots + len(self.staging)
        self._device.note_use(id(self), held * self.shape.block_bytes)

    def _drop(self, units: Units) -> None:
        self.arena.freed(self.residency.drop(units))

    def _leave_windows(self, row: int, committed: int) -> None:
        """Drop the blocks that no later token of a sliding layer can see."""
        for layer, window in enumerate(self.shape.windows):
            if window is None:
                continue
            first = int(self._first_block[layer, row])
            outside = max(0, committed - window + 1) // self.shape.block_size
            if outside <= first:
                continue
            units = self.residency.units(layer, row, np.arange(first, outside))
            idle = ~self.residency.in_flight.ravel()[units]
            self._drop(units[idle])
            if idle.all():
                self._first_block[layer, row] = outside
            else:
                self._overdue.add(row)

    def _drop_overdue(self) -> bool:
        """Drop what was in flight when it left its window; say whether there was anything to try.

        Its slots and homes are counted on: nothing is left over for blocks that nobody sees.
        """
        rows, self._overdue = self._overdue, set()
        for row in rows:
            self._leave_windows(row, int(self.ledger.committed[row]))
        return bool(rows)

    def _make_room(self, num_slots: int) -> None:
        """Free slots until `num_slots` are: stored blocks leave, the least recently used first."""
        self._reap()
        while (lacking := num_slots - self.residency.num_free_slots) > 0:
            candidates = self.residency.demotable()
            if len(candidates):
                units = lru.victims(self.residency, candidates, lacking)
                self.arena.freed(self.residency.demote(units))
            elif self._moves:
                self._settle_move()
            elif self._drop_overdue():
                self._write_down()  # what had found no home
            else:
                raise NoRoomError(
                    f"{lacking} of {num_slots} slots lacking, and no stored block can leave"
                )

    def _write_down(self) -> None:
        units = self.residency.unstored()[: self.residency.num_free_homes]
        for start in range(0, len(units), _STORE_BATCH):
            ticket = self.residency.prepare_store(units[start : start + _STORE_BATCH])
            self._moves.append(
                (ticket, self.mover.store(self.homes, self.arena, ticket.slots, ticket.homes))
            )

    def _promote(self) -> None:
        """Load blocks into slots that nothing else will need in the next round."""
        reserve = len(self._layers) * int((self._num_blocks > 0).sum())
        spare = self.residency.num_free_slots - reserve
        if spare <= 0 or self._moves:
            return
        units = self.residency.loadable()[: min(spare, _STORE_BATCH)]
        if len(units):
            ticket = self.residency.prepare_load(units)
            move = self.mover.load(
                self.homes,
                self.arena,
                ticket.slots,
                ticket.homes,
                # The next pass streams these blocks if they are late, whereas somebody may wait for
                # the slots that a write-down frees: so they go after everything else.
                priority=Priority.RECALL,
            )
            self._moves.append((ticket, move))

    def _reap(self) -> None:
        while self._moves and self._moves[0][1].is_over:
            self._settle_move()

    def _finish_moves(self) -> None:
        while self._moves:
            self._settle_move()

    def _settle_move(self) -> None:
        """Wait for the oldest move and record how it went; raise what it raised."""
        ticket, move = self._moves[0]
        is_store = ticket.kind is MoveKind.STORE
        self.mover.wait(move, Guard.REUSE_AFTER_STORE if is_store else Guard.READ_AFTER_PROMOTION)
        try:
            move.check()
        except OSError:
            self._moves.popleft()
            self.residency.fail(ticket)
            raise
        self._moves.popleft()
        self.residency.complete(ticket)
        moved = len(ticket.units) * self.shape.block_bytes
        if is_store:
            self.counters.bytes_down += moved
            self.counters.blocks_written += len(ticket.units)
        else:
            self.counters.bytes_up += moved
