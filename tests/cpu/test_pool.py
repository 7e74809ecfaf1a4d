"""The pool against plain attention over everything, with real files, threads and faults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool_bench import LAYERS, ROWS, TOKENS, Bench, shape_of
from vocabulary import TOLERANCES

from specoffload.errors import CorruptBlockError, SpillError
from specoffload.tiers.faults import Fault, FaultKind, Verb
from specoffload.tiers.host import available_host_bytes

EXACT = TOLERANCES[torch.float32].attention


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


@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("kind", [FaultKind.IO_ERROR, FaultKind.NO_SPACE])
def test_an_io_error_surfaces_and_the_threads_survive_it(
    bench: Bench, verb: Verb, kind: FaultKind
) -> None:
    bench.rounds(4)
    bench.calls.inject(Fault(verb=verb, kind=kind))
    with pytest.raises(SpillError) as caught:
        bench.rounds(4)
    bench.calls.inject()
    assert caught.value.errno == kind.value
    assert caught.value.filename
    bench.forget()
    for _ in range(6):
        assert bench.round([4, 4], [4, 4]) < EXACT


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_block_damaged_on_disk_is_not_served(bench: Bench, verb: Verb) -> None:
    if verb == "read":
        bench.rounds(4)
    bench.calls.inject(Fault(verb=verb, kind=FaultKind.FLIP))
    with pytest.raises(CorruptBlockError, match="checksum"):
        bench.rounds(6)


def test_an_interrupted_pass_changes_nothing(bench: Bench) -> None:
    bench.rounds(4)
    frontier = bench.pool.ledger.frontier.tolist()
    with pytest.raises(KeyboardInterrupt):
        bench.interrupted_pass()
    assert bench.pool.ledger.frontier.tolist() == frontier
    for row in range(ROWS):
        bench.pool.settle(row, 0)
    assert bench.round([3, 4], [3, 4]) < EXACT


def test_slow_moves_are_waited_for(bench: Bench) -> None:
    bench.calls.inject(Fault(verb="read", kind=FaultKind.DELAY, delay_s=0.004))
    for _ in range(8):
        assert bench.round([4, 4], [4, 4]) < EXACT
    assert bench.mover.stall_s > 0


def test_free_memory_is_at_most_the_machine_s() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_host_bytes() <= total
