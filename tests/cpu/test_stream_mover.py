"""The engine for devices with streams, on simulated ones: by data, and by recorded accesses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from happens_before import races
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_bench import Bench, shape_of
from simulated_streams import SimulatedStreams
from vocabulary import (
    TOLERANCES,
    assert_clean,
    assert_exact,
    draft_of,
    minimum_budget,
    prompt,
    target_of,
)

import specoffload.runner
from specoffload import SpecOffloadConfig, SpecOffloadRunner
from specoffload.tiers.access import Guard, recording
from specoffload.tiers.device import DeviceArena, KVShape
from specoffload.tiers.disk import SpillFile
from specoffload.tiers.faults import Fault, FaultKind, FaultyCalls
from specoffload.tiers.homes import Homes
from specoffload.tiers.host import HostArena
from specoffload.tiers.ram import allocate
from specoffload.tiers.stream import table_in_ram, table_on_device
from specoffload.tiers.stream_mover import StreamMover
from specoffload.tiers.upload import pack, unpack

EXACT = TOLERANCES[torch.float32].attention
SHAPE = KVShape(
    num_layers=1, num_kv_heads=1, head_dim=8, block_size=2, dtype=torch.float32, windows=(None,)
)
NUM_SLOTS, NUM_HOST, NUM_EXTENTS = 6, 4, 4


class Device:
    """Slots that a compute stream stamps and looks at, and homes below; the host runs ahead."""

    def __init__(self, folder: Path, *, seed: int = 0, delay_s: float = 0.002) -> None:
        self.streams = SimulatedStreams(seed=seed, delay_s=delay_s, inline=False)
        self.calls = FaultyCalls()
        spill = SpillFile(folder, SHAPE.block_bytes, NUM_EXTENTS, calls=self.calls)
        self.homes = Homes(HostArena(NUM_HOST, SHAPE.block_bytes), spill)
        self.arena = DeviceArena(SHAPE, allocate(NUM_SLOTS * SHAPE.block_bytes), NUM_SLOTS)
        self.mover = StreamMover(self.streams, 2 * SHAPE.block_bytes)
        self.seen: list[tuple[int, int, int]] = []

    def stamp(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Let compute write a value into every byte of each slot."""
        self.arena.computes_on(torch.from_numpy(slots), writes=True)
        memory = self.arena.raw.numpy()

        def write() -> None:
            memory[slots] = values[:, None]

        self.streams.compute(write)

    def look(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Let compute compare every byte of each slot with a value."""
        self.arena.computes_on(torch.from_numpy(slots))
        memory = self.arena.raw.numpy()

        def read() -> None:
            for slot, value in zip(slots.tolist(), values.tolist(), strict=True):
                found = np.unique(memory[slot])
                self.seen += [(slot, value, int(byte)) for byte in found if byte != value]

        self.streams.compute(read)

    def close(self) -> None:
        self.mover.close()
        self.homes.close()


def exchange(device: Device, draw: Callable[[int, int], int], rounds: int) -> None:
    """Stamp, store, overwrite, load elsewhere, look: blocks wander between slots and homes."""
    value_of: dict[int, int] = {}
    value = 0
    for number in range(rounds):
        count = draw(1, 3)
        slots = np.random.default_rng(number).permutation(NUM_SLOTS).astype(np.int32)
        homes = np.random.default_rng(-number % 97).permutation(NUM_HOST + NUM_EXTENTS)
        homes = homes.astype(np.int32)[:count]
        source, target = slots[:count], slots[count : 2 * count]
        values = (np.arange(count) + value) % 251
        value += count
        device.stamp(source, values.astype(np.uint8))
        store = device.mover.store(device.homes, device.arena, source, homes)
        if draw(0, 1):  # something else is computed meanwhile
            device.look(source, values)
        device.mover.wait(store, Guard.REUSE_AFTER_STORE)
        store.check()
        value_of.update(zip(homes.tolist(), values.tolist(), strict=True))
        device.stamp(source, np.full(count, 252, np.uint8))
        known = np.array(sorted(value_of), np.int32)[:count]
        loads = [device.mover.load(device.homes, device.arena, target[: len(known)], known)]
        if draw(0, 1):
            loads.append(device.mover.load(device.homes, device.arena, source[: len(known)], known))
        for load, into in zip(loads, (target, source), strict=False):
            device.mover.wait(load, Guard.READ_AFTER_LOAD)
            load.check()
            device.look(into[: len(known)], np.array([value_of[home] for home in known.tolist()]))


@settings(max_examples=max(10, settings.default.max_examples // 2))
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_no_plan_has_a_race_and_every_byte_is_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seed: int
) -> None:
    with recording() as log:
        device = Device(tmp_path_factory.mktemp("spill"), seed=seed, delay_s=0.001)
        exchange(device, lambda low, high: data.draw(st.integers(low, high)), rounds=8)
        device.close()
    assert device.seen == []
    found = races(log.events)
    assert not found, "\n".join(map(str, found[:5]))


WAITS_OF_THE_STREAMS = (
    Guard.STORE_AFTER_WRITE,
    Guard.LOAD_AFTER_READ,
    Guard.READ_AFTER_LOAD,
    Guard.REUSE_AFTER_STORE,
    Guard.FILL_AFTER_COPY,
    Guard.WRITE_AFTER_COPY,
)


def busy(device: Device) -> None:
    rng = np.random.default_rng(5)
    exchange(device, lambda low, high: int(rng.integers(low, high + 1)), rounds=12)
    # More blocks than both halves of the pinned buffers hold.
    extents = np.arange(NUM_HOST, NUM_HOST + NUM_EXTENTS, dtype=np.int32)
    slots = np.arange(NUM_EXTENTS, dtype=np.int32)
    for _ in range(3):
        device.stamp(slots, slots.astype(np.uint8))
        store = device.mover.store(device.homes, device.arena, slots, extents)
        device.mover.wait(store, Guard.REUSE_AFTER_STORE)
        device.stamp(slots, np.full(NUM_EXTENTS, 252, np.uint8))
        for _ in range(2):
            load = device.mover.load(device.homes, device.arena, slots, extents)
            device.mover.wait(load, Guard.READ_AFTER_LOAD)
            load.check()
            device.look(slots, slots)


@pytest.mark.parametrize("guard", [None, *WAITS_OF_THE_STREAMS], ids=lambda g: g and g.name)
def test_a_missing_wait_is_found(
    guard: Guard | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, finish = StreamMover.fence, StreamMover.finish

    def forgetful_fence(self: Any, stream: Any, mark: Any, asked: Guard) -> None:
        if asked is not guard:
            fence(self, stream, mark, asked)

    def forgetful_finish(self: Any, mark: Any, asked: Guard) -> None:
        if asked is not guard:
            finish(self, mark, asked)

    monkeypatch.setattr(StreamMover, "fence", forgetful_fence)
    monkeypatch.setattr(StreamMover, "finish", forgetful_finish)
    with recording() as log:
        device = Device(tmp_path, delay_s=0.004)
        try:
            busy(device)
        finally:
            device.close()
    assert bool(races(log.events)) is (guard is not None)
    if guard is None:
        assert device.seen == []


def test_a_wait_that_matters_shows_in_the_data_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the simulation is no mere bookkeeping: without the wait compute reads old bytes."""
    monkeypatch.setattr(StreamMover, "fence", lambda *_: None)
    device = Device(tmp_path, delay_s=0.004)
    busy(device)
    device.close()
    assert device.seen


def test_giving_everything_up_waits_for_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = np.arange(4, dtype=np.int32)
    places = np.array([0, 1, NUM_HOST, NUM_HOST + 1], np.int32)
    for forgets in (False, True):
        with monkeypatch.context() as patch, recording() as log:
            if forgets:
                patch.setattr(StreamMover, "finish", lambda *_: None)
            device = Device(tmp_path, delay_s=0.01)
            device.stamp(slots, slots.astype(np.uint8))
            device.mover.store(device.homes, device.arena, slots, places)
            device.mover.quiesce()
            device.stamp(slots, slots.astype(np.uint8))
            patch.undo()
            device.close()
        assert bool(races(log.events)) is forgets


def test_neighbours_are_copied_in_one_piece_and_events_are_used_again(tmp_path: Path) -> None:
    device = Device(tmp_path)
    slots, homes = np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32)
    device.mover.wait(
        device.mover.store(device.homes, device.arena, slots, homes), Guard.REUSE_AFTER_STORE
    )
    assert device.streams.num_copies == 1
    scattered = np.array([5, 1, 2, 4], np.int32)
    for number in range(200):
        load = device.mover.load(device.homes, device.arena, scattered, homes)
        device.mover.wait(load, Guard.READ_AFTER_LOAD)
        if number == 0:
            assert device.streams.num_copies == 4, "a pair of neighbours and two alone"
        device.mover.quiesce()
    del load
    assert device.streams.num_events < 20
    assert device.mover.up_s > 0
    device.close()


def test_an_io_error_surfaces_and_the_engine_survives_it(tmp_path: Path) -> None:
    device = Device(tmp_path)
    slots = np.arange(2, dtype=np.int32)
    extents = slots + np.int32(NUM_HOST)
    device.stamp(slots, np.array([7, 8], np.uint8))
    device.calls.inject(Fault(verb="write", kind=FaultKind.NO_SPACE, count=1))
    for fails in (True, False):
        store = device.mover.store(device.homes, device.arena, slots, extents)
        device.mover.wait(store, Guard.REUSE_AFTER_STORE)
        if fails:
            with pytest.raises(OSError, match="No space left"):
                store.check()
    store.check()
    assert device.mover.num_bytes > 0, "the pinned buffers count"
    device.close()
    assert device.streams.pinned == set()


def test_a_pool_is_exact_on_streams(tmp_path: Path) -> None:
    with recording() as log:
        for host in (0, 3, 1000):
            bench = Bench(tmp_path, shape_of(4), host=host, extra=8, step=4, mover=_mover())
            for _ in range(8):
                assert bench.round([4, 4], [4, 4]) < EXACT
            bench.pool.release(0)
            bench.texts[0] = bench.texts[0][..., :0, :]
            for _ in range(3):
                assert bench.round([0, 1], [0, 1]) < EXACT
            bench.close()
    found = races(log.events)
    assert not found, "\n".join(map(str, found[:5]))


def _mover(*_: object, block_bytes: int = 1 << 12) -> StreamMover[Any]:
    return StreamMover(SimulatedStreams(delay_s=0.0005), block_bytes)


def test_a_whole_call_on_streams_is_exact_and_has_no_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specoffload.runner, "mover_for", _mover)
    target, draft = target_of("gemma3"), draft_of("gemma3", "noisy")
    options: dict[str, Any] = {
        "block_size": 4,
        "num_draft_tokens": 4,
        "host_budget": "32KiB",
        "disk_path": tmp_path,
        "prefill_chunk": 16,
        "poison": True,
    }
    with recording() as log, assert_clean(target, draft):
        minimum = minimum_budget(draft, target, SpecOffloadConfig(**options))
        config = SpecOffloadConfig(device_budget=minimum + 4096, **options)
        with SpecOffloadRunner(draft, target, config) as runner:
            for seed in range(2):
                assert_exact(runner, target, prompt(60, seed=seed), max_new_tokens=12)
            assert runner.report().bytes_up > 0
    found = races(log.events)
    assert not found, "\n".join(map(str, found[:5]))


def test_what_a_pass_needs_is_packed_into_one_copy() -> None:
    arrays = [
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.arange(5, dtype=np.int32),
        np.zeros((2, 0), np.int64),
        np.arange(24, dtype=np.int32).reshape(2, 3, 4)[:, ::2],
    ]
    for array, tensor in zip(arrays, unpack(torch.from_numpy(pack(arrays)), arrays), strict=True):
        assert tensor.shape == array.shape
        assert (tensor.numpy() == array).all()
        assert tensor.numpy().dtype == array.dtype


def test_a_table_is_the_same_wherever_it_is_made() -> None:
    places = (
        np.array([0, 1, 1]),
        np.array([4, 0, 3]),
        np.array([7, 0, 9], np.int32),
    )
    table = table_in_ram((2, 5), *places)
    assert table.tolist() == [[-1, -1, -1, -1, 7], [0, -1, -1, 9, -1]]
    on_device = table_on_device((2, 5), *map(torch.from_numpy, places))
    assert on_device.equal(table)
    assert on_device.dtype == table.dtype == torch.int32
