"""One model's paged KV: its arena, its table, its moves, and the forward passes that read it.

Knows blocks and tensors, and no models: a forward pass appends keys and values layer by layer and
attends to everything before them, wherever it lies. Blocks on the device are attended in place; the
others stream through the staging slots in layer order, half of them loading while the other half is
read, and the parts are merged by log-sum-exp. So attention is exact at any budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specoffload.core.budget import Share
from specoffload.core.ledger import Ledger
from specoffload.core.policy import lru
from specoffload.core.residency import MoveKind, NoRoomError, Residency, Ticket, Units
from specoffload.tiers.device import DeviceArena, DeviceMemory, KVShape
from specoffload.tiers.transfer import Homes, Mover
from specoffload_kernels import AttentionPart, append, block_mass, merge, paged_attention

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
        mover: Mover,
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
        self._round = 0
        self._moves: deque[tuple[Ticket, Future[None]]] = deque()

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
            self.ledger.reset(row)

    def abandon(self) -> None:
        """Take back every move, and return when none is running; what failed no longer matters."""
        self.mover.quiesce()
        for ticket, _ in self._moves:
            self.residency.cancel(ticket)
        self._moves.clear()

    # ---- moves

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

    def _make_room(self, num_slots: int) -> None:
        """Free slots until `num_slots` are: stored blocks leave, the least recently used first."""
        self._reap()
        while (lacking := num_slots - self.residency.num_free_slots) > 0:
            candidates = self.residency.demotable()
            if len(candidates):
                units = lru.victims(self.residency, candidates, lacking)
                self.arena.freed(self.residency.demote(units))
            elif self._moves:
                # Protects the slots that a store still reads from being written again.
                self._settle_move()
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
            self._moves.append(
                (ticket, self.mover.load(self.homes, self.arena, ticket.slots, ticket.homes))
            )

    def _reap(self) -> None:
        while self._moves and self._moves[0][1].done():
            self._settle_move()

    def _finish_moves(self) -> None:
        while self._moves:
            self._settle_move()

    def _settle_move(self) -> None:
        """Wait for the oldest move and record how it went; raise what it raised."""
        ticket, future = self._moves[0]
        try:
            self.mover.wait(future)
        except OSError:
            self._moves.popleft()
            self.residency.fail(ticket)
            raise
        self._moves.popleft()
        self.residency.complete(ticket)
        moved = len(ticket.units) * self.shape.block_bytes
        if ticket.kind is MoveKind.STORE:
            self.counters.bytes_down += moved
            self.counters.blocks_written += len(ticket.units)
        else:
            self.counters.bytes_up += moved


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Absent blocks of one layer that fit one half of the staging area."""

    layer: int
    rows: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int32]
    homes: npt.NDArray[np.int32]


class ForwardPass:
    """One pass of one model over a batch of rows: append each layer's KV, then attend.

    Use as a context manager: leaving it normally moves the frontiers of its rows; leaving it by an
    exception stops the streaming and changes nothing.
    """

    def __init__(
        self,
        pool: BlockPool,
        rows: npt.NDArray[np.int64],
        start: npt.NDArray[np.int64],
        num_new: npt.NDArray[np.int64],
        num_queries: int,
        *,
        with_signal: bool,
    ) -> None:
        self._pool = pool
        self._rows = rows
        self._num_new = num_new
        self._with_signal = with_signal
        self._parts: list[AttentionPart] = []
        residency, block_size = pool.residency, pool.shape.block_size
        end = start + num_new
        num_blocks = max(1, int(-(-end.max() // block_size)))
        table_LBN = np.ascontiguousarray(residency.slot[:, rows, :num_blocks])
        position_BQ = start[:, None] + np.arange(num_queries)
        is_new_BQ = np.arange(num_queries) < num_new[:, None]
        block_BQ = np.minimum(position_BQ // block_size, num_blocks - 1)
        slot_LBQ = np.where(
            is_new_BQ,
            np.take_along_axis(table_LBN, block_BQ[None].repeat(len(table_LBN), 0), 2),
            -1,
        )
        # Padding queries stay within the model's positions; what they compute is never used.
        self.positions_BQ = torch.from_numpy(
            np.minimum(position_BQ, np.maximum(end - 1, 0)[:, None])
        )
        self._table_LBN = torch.from_numpy(table_LBN)
        self._slot_LBQ = torch.from_numpy(slot_LBQ)
        self._offset_BQ = torch.from_numpy(position_BQ % block_size)
        self._start_B = torch.from_numpy(start)
        self._end_B = torch.from_numpy(end)
        self._stream = _Stream(pool, rows, num_blocks)

    def append(self, layer: int, k_BHQD: torch.Tensor, v_BHQD: torch.Tensor) -> None:
        """Write a layer's new keys and values behind the frontier of each row."""
        append(self._pool.arena.tensor, k_BHQD, v_BHQD, self._slot_LBQ[layer], self._offset_BQ)

    def attend(
        self,
        layer: int,
        q_BHQD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return attention of the queries over everything at or before them, `[B, Q, Hq, D]`.

        Raises:
            SpillError: a block could not be read back, or did not match its checksum.
        """
        arena = self._pool.arena.tensor

        def part(table_BN: torch.Tensor) -> AttentionPart:
            return paged_attention(
                q_BHQD,
                arena,
                table_BN,
                self._start_B,
                self._end_B,
                scale=scale,
                window=window,
                softcap=softcap,
                with_block_lse=self._with_signal,
            )

        parts = [part(self._table_LBN[layer])]
        parts += [part(table_BN) for table_BN in self._stream.tables(layer)]
        merged = merge(parts, sinks_H=sinks_H)
        if self._with_signal:
            self._parts.append(merged)
        return merged.out_BQHD.to(q_BHQD.dtype)

    def mass(self, num_rows: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return each block's mass over the first `num_rows[b]` queries of a row.

        Returns:
            `[layer, row, kv_head, block]`; sums to 1 over blocks.

        Precondition: the pass is complete and was begun `with_signal`.
        """
        block_lse = torch.stack(
            [part.block_lse_BHQN for part in self._parts if part.block_lse_BHQN is not None]
        )
        lse = torch.stack([part.lse_BHQ for part in self._parts])
        mass: npt.NDArray[np.float32] = block_mass(
            block_lse, lse, self._pool.shape.num_kv_heads, torch.tensor(num_rows)
        ).numpy()
        return mass

    def __enter__(self) -> ForwardPass:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stream.close()
        if kind is None:
            self._pool.ledger.advance(self._rows, self._num_new)

    def cancel(self) -> None:
        """Give up a pass that will not run. Idempotent."""
        self._stream.close()


class _Stream:
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

    def _plan(self, rows: npt.NDArray[np.int64]) -> Iterator[_Chunk]:
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
                yield _Chunk(
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
