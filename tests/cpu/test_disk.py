"""The spill file: what was written comes back, or an error does; never anything else."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from vocabulary import assert_exact, draft_of, minimum_budget, prompt, target_of

from specoffload import SpecOffloadConfig, SpecOffloadRunner
from specoffload.errors import ConfigError, CorruptBlockError, SpillError
from specoffload.tiers.disk import SpillFile, direct_io_problem
from specoffload.tiers.fault_check import check_faults
from specoffload.tiers.faults import Fault, FaultKind, FaultyCalls
from specoffload.tiers.file_calls import FileCalls
from specoffload.tiers.ram import PAGE, allocate

EXTENT = 512


def blocks_of(values: list[int]) -> list[np.ndarray]:
    return [np.full(EXTENT, value, np.uint8) for value in values]


@given(order=st.permutations(list(range(12))), short=st.integers(1, 3 * EXTENT))
def test_scattered_extents_come_back_whole_even_from_short_transfers(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], short: int
) -> None:
    calls = FaultyCalls(
        Fault(verb="write", kind=FaultKind.SHORT, num_bytes=short),
        Fault(verb="read", kind=FaultKind.SHORT, num_bytes=short),
    )
    spill = SpillFile(tmp_path_factory.mktemp("spill"), EXTENT, 12, calls=calls)
    spill.write(np.array(order, np.int32), blocks_of(order))
    found = blocks_of([255] * 12)
    spill.read(np.arange(12, dtype=np.int32), found)
    assert [int(block[0]) for block in found] == list(range(12))
    assert all((block == block[0]).all() for block in found)
    spill.close()


def test_the_file_has_no_name_and_is_private(tmp_path: Path) -> None:
    calls = FaultyCalls()
    spill = SpillFile(tmp_path, EXTENT, 4, calls=calls)
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(os.fstat(calls.descriptors[-1]).st_mode) == 0o600
    assert os.fstat(calls.descriptors[-1]).st_nlink == 0
    assert spill.num_bytes == 4 * EXTENT
    spill.close()
    spill.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_block_is_never_served(tmp_path: Path, damage: str) -> None:
    calls = FaultyCalls()
    spill = SpillFile(tmp_path, EXTENT, 2, calls=calls)
    spill.write(np.array([0, 1], np.int32), blocks_of([1, 2]))
    if damage == "flip":
        os.pwrite(calls.descriptors[-1], b"\x55", EXTENT + 17)
        with pytest.raises(CorruptBlockError, match="extent 1") as caught:
            spill.read(np.array([0, 1], np.int32), blocks_of([0, 0]))
    else:
        os.ftruncate(calls.descriptors[-1], EXTENT + 100)
        with pytest.raises(SpillError, match="ends early") as caught:
            spill.read(np.array([1], np.int32), blocks_of([0]))
    assert caught.value.filename == str(tmp_path)
    assert caught.value.errno == errno.EIO
    found = blocks_of([0])
    spill.read(np.array([0], np.int32), found)
    assert (found[0] == 1).all()
    spill.close()


def test_a_block_that_was_never_written_is_refused(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path, EXTENT, 2)
    with pytest.raises(CorruptBlockError):
        spill.read(np.array([0], np.int32), blocks_of([0]))
    spill.close()


def test_a_failed_write_leaves_the_extent_unreadable(tmp_path: Path) -> None:
    calls = FaultyCalls()
    spill = SpillFile(tmp_path, EXTENT, 2, calls=calls)
    spill.write(np.array([0], np.int32), blocks_of([1]))
    calls.inject(Fault(verb="write", kind=FaultKind.NO_SPACE))
    with pytest.raises(SpillError) as caught:
        spill.write(np.array([0], np.int32), blocks_of([2]))
    calls.inject()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(CorruptBlockError):
        spill.read(np.array([0], np.int32), blocks_of([0]))
    spill.close()


@pytest.mark.parametrize("kind", ["missing", "regular file"])
def test_an_unusable_folder_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "there"
    if kind == "regular file":
        folder.write_text("not a folder")
    with pytest.raises(SpillError, match="existing folder") as caught:
        SpillFile(folder, EXTENT, 2)
    assert caught.value.filename == str(folder)
    assert caught.value.errno in (errno.ENOENT, errno.ENOTDIR)


def test_more_than_the_disk_holds_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    too_many = free.f_blocks * free.f_frsize // EXTENT + 10
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(SpillError, match="reserve") as caught:
        SpillFile(tmp_path, EXTENT, too_many)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert list(tmp_path.iterdir()) == []


# Past the page cache.


def needs_direct_io(folder: Path) -> None:
    problem = direct_io_problem(folder)
    if problem is not None:
        pytest.skip(f"{folder} lies on a file system without direct I/O: {problem}")


@pytest.mark.parametrize("short", [None, 1, PAGE + 7, 3 * PAGE])
def test_past_the_page_cache_blocks_come_back_whole(tmp_path: Path, short: int | None) -> None:
    """A transfer that stops within a page goes on at the page; one that cannot go on fails."""
    needs_direct_io(tmp_path)
    calls = FaultyCalls()
    spill = SpillFile(tmp_path, 2 * PAGE, 6, direct=True, calls=calls)
    assert fcntl.fcntl(calls.descriptors[-1], fcntl.F_GETFL) & os.O_DIRECT
    arena = allocate(12 * PAGE).numpy().reshape(6, 2 * PAGE)
    arena[:] = np.arange(6, dtype=np.uint8)[:, None] + 1
    spill.write(np.array([3, 4, 1, 0, 5, 2], np.int32), list(arena))
    found = allocate(12 * PAGE).numpy().reshape(6, 2 * PAGE)
    order = np.array([3, 4, 1, 0, 5, 2], np.int32)
    if short is not None:
        calls.inject(Fault(verb="read", kind=FaultKind.SHORT, num_bytes=short))
    if short is not None and short < PAGE:
        with pytest.raises(SpillError):
            spill.read(order, list(found))
    else:
        spill.read(order, list(found))
        assert (found == arena).all()
    spill.close()


def test_a_block_damaged_past_the_page_cache_is_not_served(tmp_path: Path) -> None:
    needs_direct_io(tmp_path)
    calls = FaultyCalls(Fault(verb="write", kind=FaultKind.FLIP))
    spill = SpillFile(tmp_path, PAGE, 2, direct=True, calls=calls)
    block = allocate(PAGE).numpy()
    spill.write(np.array([1], np.int32), [block])
    with pytest.raises(CorruptBlockError, match="extent 1"):
        spill.read(np.array([1], np.int32), [block])
    spill.close()


class NoDirectIO(FileCalls):
    """A file system that refuses the flag, or takes it and refuses to transfer."""

    def __init__(self, *, takes_the_flag: bool) -> None:
        self._takes_the_flag = takes_the_flag

    def bypass_page_cache(self, fd: int) -> None:
        if not self._takes_the_flag:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def read(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.parametrize("takes_the_flag", [True, False])
def test_a_file_system_without_direct_io_is_refused_with_the_remedy(
    tmp_path: Path, takes_the_flag: bool
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    calls = NoDirectIO(takes_the_flag=takes_the_flag)
    with pytest.raises(SpillError, match=r"no direct I/O.*disk_io to 'buffered'") as caught:
        SpillFile(tmp_path, PAGE, 2, direct=True, calls=calls)
    assert caught.value.filename == str(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_runner_goes_past_the_page_cache_when_asked(tmp_path: Path) -> None:
    needs_direct_io(tmp_path)
    target, draft = target_of("llama"), draft_of("llama", "noisy")
    options: dict[str, Any] = {
        "block_size": 32,
        "num_draft_tokens": 4,
        "host_budget": 0,
        "disk_path": tmp_path,
        "poison": True,
    }
    budget = minimum_budget(draft, target, SpecOffloadConfig(**options))
    for disk_io in ("direct", "buffered", "auto"):
        config = SpecOffloadConfig(device_budget=budget, disk_io=disk_io, **options)
        with SpecOffloadRunner(draft, target, config) as runner:
            assert_exact(runner, target, prompt(130), max_new_tokens=12)
            assert runner.report().bytes_up > 0
            assert runner.report().engine_bytes > 0


def test_direct_io_of_blocks_that_are_no_whole_pages_is_refused(tmp_path: Path) -> None:
    needs_direct_io(tmp_path)
    target = target_of("llama")
    with pytest.raises(ConfigError, match="whole pages of 4096 bytes, and blocks have 1024"):
        SpecOffloadRunner(
            None, target, {"disk_io": "direct", "disk_path": tmp_path, "block_size": 4}
        )


# The check that `doctor --faults` makes.


@pytest.mark.parametrize("direct", [False, True])
def test_every_fault_is_reported_as_what_it_is(tmp_path: Path, direct: bool) -> None:
    if direct:
        needs_direct_io(tmp_path)
    outcomes = dict(check_faults(tmp_path, direct=direct))
    assert len(outcomes) == 10
    assert set(outcomes.values()) == {None}
    assert not list(tmp_path.iterdir())


def test_the_check_notices_a_disk_tier_that_serves_damaged_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda _: 0)
    outcomes = dict(check_faults(tmp_path))
    wrong = {name: problem for name, problem in outcomes.items() if problem is not None}
    assert wrong == {
        "bit flipped when read": "other bytes came back",
        "bit flipped when written": "other bytes came back",
    }


def test_the_check_notices_an_error_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(FileCalls, "write", failing)
    outcomes = dict(check_faults(tmp_path))
    assert outcomes["full disk"] == (
        "and after it a move without a fault fails:"
        f" [Errno 5] cannot write a block: broken: '{tmp_path}'"
    )
