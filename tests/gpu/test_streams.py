"""The streams of a GPU under the transfer engine: blocks come back as they left, in small cases.

Small enough for `compute-sanitizer --tool racecheck` and `memcheck`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specoffload.tiers.access import Guard
from specoffload.tiers.cuda import CudaStreams
from specoffload.tiers.device import DeviceArena, KVShape
from specoffload.tiers.disk import SpillFile
from specoffload.tiers.homes import Homes
from specoffload.tiers.host import HostArena, HostMemory
from specoffload.tiers.stream_mover import StreamMover

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU"),
]

SHAPE = KVShape(
    num_layers=1, num_kv_heads=4, head_dim=64, block_size=16, dtype=torch.float32, windows=(None,)
)
NUM_SLOTS, NUM_HOST, NUM_EXTENTS = 8, 4, 4


@pytest.mark.parametrize("busy", [False, True])
def test_blocks_come_back_as_they_left(tmp_path: Path, busy: bool) -> None:
    """While compute is behind the host, every wait but the streams' own comes too early."""
    device = torch.device("cuda", torch.cuda.current_device())
    mover = StreamMover(CudaStreams(device), 2 * SHAPE.block_bytes)
    memory = HostMemory(pin=mover.pin, unpin=mover.unpin, keeps=True)
    (host,) = memory.carve([NUM_HOST * SHAPE.block_bytes])
    assert host.is_pinned()
    spill = SpillFile(tmp_path, SHAPE.block_bytes, NUM_EXTENTS)
    homes = Homes(HostArena(NUM_HOST, SHAPE.block_bytes, host), spill)
    buffer = torch.empty(NUM_SLOTS * SHAPE.block_bytes, dtype=torch.uint8, device=device)
    arena = DeviceArena(SHAPE, buffer, NUM_SLOTS)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    rng = np.random.default_rng(0)
    square = torch.randn(2048, 2048, device=device)
    for number in range(40):
        if busy:
            square = torch.tanh(square @ square)
        slots = rng.permutation(NUM_SLOTS).astype(np.int32)
        places = rng.permutation(NUM_HOST + NUM_EXTENTS).astype(np.int32)[:4]
        source, target = slots[:4], slots[4:]
        for slot in source:
            arena.raw[int(slot)] = (number + int(slot)) % 251
        store = mover.store(homes, arena, source, places)
        mover.wait(store, Guard.REUSE_AFTER_STORE)
        store.check()
        for slot in source:
            arena.raw[int(slot)] = 255
        load = mover.load(homes, arena, target, places)
        mover.wait(load, Guard.READ_AFTER_LOAD)
        load.check()
        for slot, origin in zip(target, source, strict=True):
            wrong += (arena.raw[int(slot)] != (number + int(origin)) % 251).sum()
            arena.raw[int(slot)] = 255
    assert int(wrong) == 0
    mover.quiesce()
    assert mover.up_s > 0
    assert mover.down_s > 0
    homes.close()
    memory.release()
    mover.close()
