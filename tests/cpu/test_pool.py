"""The pool against plain attention over everything, with real files, threads and faults."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vocabulary import TOLERANCES

from specoffload.core.budget import Share, span_blocks
from specoffload.errors import CorruptBlockError, SpillError
from specoffload.tiers.device import DeviceMemory, KVShape
from specoffload.tiers.disk import SpillFile
from specoffload.tiers.host import HostArena, available_host_bytes
from specoffload.tiers.pool import BlockPool
from specoffload.tiers.transfer import Homes, Mover

LAYERS, HEADS, QUERY_HEADS, DIM = 2, 2, 4, 8
ROWS, TOKENS = 2, 40
CPU = torch.device("cpu")
EXACT = TOLERANCES[torch.float32].attention


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

    def __init__(self, folder: Path, shape: KVShape, *, host: int, extra: int, step: int) -> None:
        self.shape = shape
        self.num_blocks = -(-TOKENS // shape.block_size)
        total = LAYERS * ROWS * self.num_blocks
        slots = min(total, LAYERS * ROWS * span_blocks(step, shape.block_size) + extra)
        self.share = Share(
            num_slots=slots, num_staging=4, num_host_slots=min(host, total), num_extents=total
        )
        self.mover = Mover()
        self.spill = SpillFile(folder, shape.block_bytes, total)
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

    def round(self, num_new: list[int], accepted: list[int]) -> float:
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

    def interrupted_pass(self) -> None:
        new = torch.zeros(ROWS, HEADS, 2, DIM)
        with self.pool.begin([0, 1], [2, 2], 2, with_signal=False) as running:
            running.append(0, new, new)
            raise KeyboardInterrupt

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

    def close(self) -> None:
        self.pool.abandon()
        for row in range(ROWS):
            self.pool.release(row)
        self.pool.residency.check()
        assert self.pool.residency.num_free_slots == self.share.num_slots
        assert self.pool.residency.num_free_homes == self.pool.residency.num_homes
        self.homes.close()
        self.mover.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, shape_of(4), host=0, extra=0, step=4)
    yield made
    made.close()


@given(
    data=st.data(),
    block_size=st.sampled_from([1, 2, 4, 8]),
    host=st.sampled_from([0, 3, 1000]),
    extra=st.integers(0, 12),
    windows=st.sampled_from([(None, None), (5, None), (3, 9)]),
)
def test_attention_is_exact_whatever_leaves_the_device(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    block_size: int,
    host: int,
    extra: int,
    windows: tuple[int | None, ...],
) -> None:
    folder = tmp_path_factory.mktemp("pool")
    bench = Bench(folder, shape_of(block_size, windows), host=host, extra=extra, step=5)
    left = [TOKENS, TOKENS]
    while max(left) > 0:
        num_new = [min(n, data.draw(st.integers(0, 5))) for n in left]
        if not max(num_new):
            num_new = [min(n, 1) for n in left]
        accepted = [data.draw(st.integers(0, n)) if n else 0 for n in num_new]
        if not any(accepted):
            accepted = num_new
        assert bench.round(num_new, accepted) < EXACT
        left = [n - a for n, a in zip(left, accepted, strict=True)]
    counters = bench.pool.counters
    assert counters.blocks_written <= counters.blocks_filled
    assert counters.bytes_down == counters.blocks_written * bench.shape.block_bytes
    bench.close()


def test_blocks_are_written_once_and_leave_without_a_copy(bench: Bench) -> None:
    for _ in range(TOKENS // 4):
        bench.round([4, 4], [4, 4])
    bench.pool.release(0)
    counters = bench.pool.counters
    assert counters.blocks_filled == LAYERS * ROWS * TOKENS // 4
    assert counters.blocks_written == counters.blocks_filled
    assert counters.bytes_up > 0
    assert bench.device.peak_bytes <= (bench.share.num_slots + 4) * bench.shape.block_bytes


def test_room_that_a_finished_row_leaves_is_filled_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, shape_of(4), host=0, extra=8, step=4)
    for _ in range(8):
        bench.round([4, 4], [4, 4])
    absent = (bench.pool.residency.slot < 0) & bench.pool.residency.stored
    assert absent[:, 1].sum() > 0
    bench.pool.release(0)
    bench.texts[0] = bench.texts[0][..., :0, :]
    for _ in range(8):
        assert bench.round([0, 1], [0, 1]) < EXACT
    now = (bench.pool.residency.slot < 0) & bench.pool.residency.stored
    assert now[:, 1].sum() < absent[:, 1].sum()
    bench.close()


def test_rejected_tokens_leave_no_trace(bench: Bench) -> None:
    bench.round([4, 3], [4, 3])
    slot, ages = bench.pool.residency.slot.copy(), bench.pool.residency.last_use.copy()
    used = bench.pool.residency.num_free_slots
    bench.round([4, 4], [0, 0])
    assert (bench.pool.residency.slot == slot).all()
    assert bench.pool.residency.num_free_slots == used
    assert not bench.pool.residency.sealed[:, 1].any()
    assert bench.pool.ledger.frontier.tolist() == [4, 3]
    touched = bench.pool.residency.last_use != ages
    assert not touched[bench.pool.residency.slot.ravel() < 0].any()


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_io_error_surfaces_and_the_threads_survive_it(
    bench: Bench, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.rounds(4)

    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        with pytest.raises(SpillError) as caught:
            bench.rounds(4)
    assert caught.value.errno == errno.EIO
    assert caught.value.filename
    bench.pool.abandon()
    for row in range(ROWS):
        bench.pool.release(row)
        bench.texts[row] = bench.texts[row][..., :0, :]
    for _ in range(6):
        assert bench.round([4, 4], [4, 4]) < EXACT


def test_a_block_damaged_on_disk_is_not_served(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.rounds(4)
    original = os.preadv

    def flipped(fd: int, buffers: list[Any], offset: int) -> int:
        moved = original(fd, buffers, offset)
        np.asarray(buffers[0])[3] ^= 1
        return moved

    monkeypatch.setattr(os, "preadv", flipped)
    with pytest.raises(CorruptBlockError, match="checksum"):
        bench.round([1, 1], [1, 1])


def test_an_interrupted_pass_changes_nothing(bench: Bench) -> None:
    bench.rounds(4)
    frontier = bench.pool.ledger.frontier.tolist()
    with pytest.raises(KeyboardInterrupt):
        bench.interrupted_pass()
    assert bench.pool.ledger.frontier.tolist() == frontier
    for row in range(ROWS):
        bench.pool.settle(row, 0)
    assert bench.round([3, 4], [3, 4]) < EXACT


def test_slow_moves_are_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.preadv

    def slow(fd: int, buffers: list[Any], offset: int) -> int:
        time.sleep(0.002)
        return original(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    for _ in range(8):
        assert bench.round([4, 4], [4, 4]) < EXACT
    assert bench.mover.stall_s > 0


def test_free_memory_is_at_most_the_machine_s() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_host_bytes() <= total
