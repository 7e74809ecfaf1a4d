"""Ten thousand rounds leave nothing behind: no descriptor, no thread, no move, no memory."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from specoffload.core.budget import Share
from specoffload.tiers.device import DeviceMemory, KVShape
from specoffload.tiers.disk import SpillFile
from specoffload.tiers.homes import Homes
from specoffload.tiers.host import HostArena
from specoffload.tiers.move import Move
from specoffload.tiers.pool import BlockPool
from specoffload.tiers.transfer import ThreadMover

ROUNDS = 10_000
TOKENS = 5
SHAPE = KVShape(
    num_layers=1, num_kv_heads=1, head_dim=4, block_size=1, dtype=torch.float32, windows=(None,)
)


class Held:
    """What a process holds that a leak would add to."""

    def __init__(self) -> None:
        gc.collect()
        self.descriptors = len(list(Path("/proc/self/fd").iterdir()))
        self.threads = threading.active_count()
        self.moves = sum(type(thing) is Move for thing in gc.get_objects())


@pytest.mark.timeout(900)
def test_ten_thousand_rounds_leave_nothing_behind(tmp_path: Path) -> None:
    share = Share(num_slots=2, num_staging=4, num_host_slots=1, num_extents=TOKENS)
    mover = ThreadMover()
    spill = SpillFile(tmp_path, SHAPE.block_bytes, share.num_extents)
    homes = Homes(HostArena(share.num_host_slots, SHAPE.block_bytes), spill)
    device = DeviceMemory(torch.device("cpu"), None)
    (view,) = device.carve([6 * SHAPE.block_bytes])
    pool = BlockPool(
        SHAPE, device, view, share, num_rows=1, num_blocks=TOKENS, homes=homes, mover=mover
    )
    new = torch.randn(1, 1, 1, 4)
    early: Held | None = None
    peak_bytes = 0
    for number in range(ROUNDS):
        with pool.begin([0], [1], 1, with_signal=False) as running:
            running.append(0, new, new)
            out = running.attend(0, new, scale=1.0, window=None, softcap=None, sinks_H=None)
        pool.settle(0, 1)
        pool.end_round()
        if number % TOKENS == TOKENS - 1:
            assert torch.allclose(out[0, 0], new[0, :, 0], atol=1e-5), "equal values, so their mean"
            pool.release(0)
        if number == ROUNDS // 10:
            early, peak_bytes = Held(), mover.peak_bytes
    pool.abandon()
    late = Held()
    assert early is not None
    assert late.descriptors == early.descriptors
    assert late.threads == early.threads
    assert late.moves <= early.moves + 2
    assert mover.num_bytes == 0
    assert 0 < mover.peak_bytes <= max(peak_bytes, 1024)
    assert pool.counters.bytes_up > ROUNDS // 2 * SHAPE.block_bytes
    homes.close()
    mover.close()
