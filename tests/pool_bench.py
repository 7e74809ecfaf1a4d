"""A pool with everything that was ever appended to it, and plain attention to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specoffload.core.budget import Share, span_blocks
from specoffload.tiers.device import DeviceMemory, KVShape
from specoffload.tiers.disk import SpillFile
from specoffload.tiers.faults import FaultyCalls
from specoffload.tiers.homes import Homes
from specoffload.tiers.host import HostArena
from specoffload.tiers.pool import BlockPool
from specoffload.tiers.transfer import Mover, ThreadMover

LAYERS, HEADS, QUERY_HEADS, DIM = 2, 2, 4, 8
ROWS, TOKENS = 2, 40
CPU = torch.device("cpu")


def shape_of(block_size: int, windows: tuple[int | None, ...] = (None, None)) -> KVShape:
    return KVShape(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        block_size=block_size,
        dtype=torch.float32,
        windows=windows,
    )


class Bench:
    """A pool of the smallest size that works, and everything that was ever appended to it."""

    def __init__(
        self,
        folder: Path,
        shape: KVShape,
        *,
        host: int,
        extra: int,
        step: int,
        calls: FaultyCalls | None = None,
        mover: Mover[Any] | None = None,
    ) -> None:
        self.shape = shape
        self.num_blocks = -(-TOKENS // shape.block_size)
        total = LAYERS * ROWS * self.num_blocks
        slots = min(total, LAYERS * ROWS * span_blocks(step, shape.block_size) + extra)
        self.share = Share(
            num_slots=slots, num_staging=4, num_host_slots=min(host, total), num_extents=total
        )
        self.mover = ThreadMover() if mover is None else mover
        self.calls = FaultyCalls() if calls is None else calls
        self.spill = SpillFile(folder, shape.block_bytes, total, calls=self.calls)
        self.homes = Homes(HostArena(self.share.num_host_slots, shape.block_bytes), self.spill)
        self.device = DeviceMemory(CPU, None)
        (view,) = self.device.carve([(slots + 4) * shape.block_bytes])
        self.pool = BlockPool(
            shape,
            self.device,
            view,
            self.share,
            num_rows=ROWS,
            num_blocks=self.num_blocks,
            homes=self.homes,
            mover=self.mover,
            poison=True,
        )
        self.texts = [torch.zeros(LAYERS, 2, HEADS, 0, DIM) for _ in range(ROWS)]
        self.generator = torch.Generator().manual_seed(0)

    def round(self, num_new: Sequence[int], accepted: Sequence[int]) -> float:
        """Append and attend; return the largest difference to plain attention."""
        width = max(num_new)
        kv = torch.randn(LAYERS, 2, ROWS, HEADS, width, DIM, generator=self.generator)
        q = torch.randn(LAYERS, ROWS, QUERY_HEADS, width, DIM, generator=self.generator)
        worst = 0.0
        with self.pool.begin([0, 1], num_new, width, with_signal=True) as running:
            for layer in range(LAYERS):
                running.append(layer, kv[layer, 0], kv[layer, 1])
                out = running.attend(
                    layer,
                    q[layer],
                    scale=DIM**-0.5,
                    window=self.shape.windows[layer],
                    softcap=None,
                    sinks_H=None,
                )
                for row in range(ROWS):
                    new = kv[layer, :, row, :, : num_new[row]]
                    expected = self.plain(layer, row, q[layer, row, :, : num_new[row]], new)
                    got = out[row, : num_new[row]].transpose(0, 1)
                    if num_new[row]:
                        worst = max(worst, float((got - expected).abs().max()))
        mass = running.mass(num_new)
        assert np.allclose(mass.sum(-1)[:, [n > 0 for n in num_new]], 1, atol=1e-5)
        for row in range(ROWS):
            new = kv[:, :, row, :, : accepted[row]]
            self.texts[row] = torch.cat([self.texts[row], new], dim=3)
            self.pool.settle(row, accepted[row])
        self.pool.end_round()
        self.pool.residency.check()
        return worst

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round([4, 4], [4, 4])

    def interrupted_pass(self, rows: Sequence[int] = (0, 1)) -> None:
        new = torch.zeros(len(rows), HEADS, 2, DIM)
        with self.pool.begin(rows, [2] * len(rows), 2, with_signal=False) as running:
            running.append(0, new, new)
            raise KeyboardInterrupt

    def discarded_pass(self, row: int) -> None:
        """Run a pass of one row to its end, and keep nothing of it."""
        new = torch.zeros(1, HEADS, 2, DIM)
        q = torch.zeros(1, QUERY_HEADS, 2, DIM)
        with self.pool.begin([row], [2], 2, with_signal=False) as running:
            for layer in range(LAYERS):
                running.append(layer, new, new)
                running.attend(layer, q, scale=1.0, window=None, softcap=None, sinks_H=None)
        self.pool.settle(row, 0)

    def plain(self, layer: int, row: int, q: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        keys, values = torch.cat([self.texts[row][layer], new], dim=2).double()
        group = QUERY_HEADS // HEADS
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        length, count = keys.shape[1], q.shape[1]
        logits = q.double() @ keys.transpose(1, 2) * DIM**-0.5
        at = torch.arange(length - count, length)[:, None]
        key = torch.arange(length)
        visible = key <= at
        window = self.shape.windows[layer]
        if window is not None:
            visible &= key > at - window
        return (logits.masked_fill(~visible, -torch.inf).softmax(-1) @ values).float()

    def forget(self) -> None:
        """Take every move back and forget every row."""
        self.pool.abandon()
        for row in range(ROWS):
            self.pool.release(row)
            self.texts[row] = self.texts[row][..., :0, :]

    def close(self) -> None:
        self.pool.abandon()
        for row in range(ROWS):
            self.pool.release(row)
        self.pool.residency.check()
        assert self.pool.residency.num_free_slots == self.share.num_slots
        assert self.pool.residency.num_free_homes == self.pool.residency.num_homes
        self.homes.close()
        self.mover.close()
