"""One forward pass over a pool: where its tokens go, and attention to everything before them.

Knows positions, tables and partial results. Refuses to know which blocks deserve the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from specoffload.tiers.stream import Stream
from specoffload.tiers.upload import upload
from specoffload_kernels import AttentionPart, append, block_mass, merge, paged_attention

if TYPE_CHECKING:
    from specoffload.tiers.pool import BlockPool


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
        position_of_model_BQ = np.minimum(position_BQ, np.maximum(end - 1, 0)[:, None])
        self._stream = Stream(pool, rows, num_blocks)
        try:
            (
                self.positions_BQ,
                self._table_LBN,
                self._slot_LBQ,
                self._offset_BQ,
                self._start_B,
                self._end_B,
                *places,
            ) = upload(
                [
                    position_of_model_BQ,
                    table_LBN,
                    slot_LBQ,
                    position_BQ % block_size,
                    start,
                    end,
                    *self._stream.places,
                ],
                pool.arena.tensor.device,
            )
        except BaseException:
            self._stream.close()
            raise
        self._stream.place(*places)

    def append(self, layer: int, k_BHQD: torch.Tensor, v_BHQD: torch.Tensor) -> None:
        """Write a layer's new keys and values behind the frontier of each row."""
        self._pool.arena.computes_on(self._slot_LBQ[layer], writes=True)
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
            self._pool.arena.computes_on(table_BN)
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
        mass = block_mass(
            block_lse,
            lse,
            self._pool.shape.num_kv_heads,
            torch.tensor(num_rows, device=lse.device),
        )
        found: npt.NDArray[np.float32] = mass.cpu().numpy()
        return found

    def __enter__(self) -> ForwardPass:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stream.close()
        if kind is None:
            self._pool.ledger.advance(self._rows, self._num_new)

    def cancel(self) -> None:
        """Give up a pass that will not run. Idempotent."""
        self._stream.close()
