"""The spill file: what was written comes back, or an error does; never anything else."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.errors import CorruptBlockError, SpillError
from specoffload.tiers.disk import SpillFile

EXTENT = 512


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors opened during a test, newest last."""
    found: list[int] = []
    original = os.open

    def remember(*args: Any, **kwargs: Any) -> int:
        found.append(original(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(os, "open", remember)
    return found


def blocks_of(values: list[int]) -> list[np.ndarray]:
    return [np.full(EXTENT, value, np.uint8) for value in values]


@given(order=st.permutations(list(range(12))), short=st.integers(1, 3 * EXTENT))
def test_scattered_extents_come_back_whole_even_from_short_transfers(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], short: int
) -> None:
    folder = tmp_path_factory.mktemp("spill")
    spill = SpillFile(folder, EXTENT, 12)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("preadv", "pwritev"):
            patch.setattr(os, name, _at_most(getattr(os, name), short))
        extents = np.array(order, np.int32)
        spill.write(extents, blocks_of(order))
        found = blocks_of([255] * 12)
        spill.read(np.arange(12, dtype=np.int32), found)
    assert [int(block[0]) for block in found] == list(range(12))
    assert all((block == block[0]).all() for block in found)
    spill.close()


def _at_most(call: Callable[..., int], limit: int) -> Callable[..., int]:
    """Transfer at most `limit` bytes, as a kernel may."""

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        first = np.asarray(buffers[0])[:limit]
        return call(fd, [first], offset)

    return short


def test_the_file_has_no_name_and_is_private(tmp_path: Path, opened: list[int]) -> None:
    spill = SpillFile(tmp_path, EXTENT, 4)
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(os.fstat(opened[-1]).st_mode) == 0o600
    assert os.fstat(opened[-1]).st_nlink == 0
    assert spill.num_bytes == 4 * EXTENT
    spill.close()
    spill.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_block_is_never_served(tmp_path: Path, damage: str, opened: list[int]) -> None:
    spill = SpillFile(tmp_path, EXTENT, 2)
    spill.write(np.array([0, 1], np.int32), blocks_of([1, 2]))
    if damage == "flip":
        os.pwrite(opened[-1], b"\x55", EXTENT + 17)
        with pytest.raises(CorruptBlockError, match="extent 1") as caught:
            spill.read(np.array([0, 1], np.int32), blocks_of([0, 0]))
    else:
        os.ftruncate(opened[-1], EXTENT + 100)
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


def test_a_failed_write_leaves_the_extent_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = SpillFile(tmp_path, EXTENT, 2)
    spill.write(np.array([0], np.int32), blocks_of([1]))

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(SpillError) as caught:
            spill.write(np.array([0], np.int32), blocks_of([2]))
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
