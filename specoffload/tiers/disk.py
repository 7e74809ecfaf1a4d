"""The disk tier: one spill file of fixed-size extents, each with a checksum.

The file has no name while it is in use, so that nothing stays behind whatever happens to the
process. Its space is reserved before it is written: a full disk is an error here, at the start, and
not a signal later. A block is never served unless its checksum matches.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from specoffload.errors import CorruptBlockError, SpillError

_Buffer: TypeAlias = npt.NDArray[np.uint8]
_Vectored: TypeAlias = Callable[[int, Any, int], int]
_MAX_RUN = 256
"""Most extents in one system call; IOV_MAX is 1,024."""


class SpillFile:
    """`num_extents` places of `extent_bytes` bytes in an unnamed file, readable by its owner only.

    Args:
        folder: where the file lies.
        extent_bytes: size of one block.
        num_extents: how many the file is made to hold.

    Raises:
        SpillError: the folder cannot be written to, or has no room for the file.
    """

    def __init__(self, folder: Path, extent_bytes: int, num_extents: int) -> None:
        self._folder = folder
        self._extent_bytes = extent_bytes
        self._checksums = np.zeros(num_extents, np.uint64)
        self._written = np.zeros(num_extents, bool)
        self._fd = _open_unnamed(folder)
        if num_extents:
            try:
                os.posix_fallocate(self._fd, 0, self.num_bytes)
            except OSError as error:
                self.close()
                raise SpillError(
                    error.errno,
                    f"cannot reserve {self.num_bytes} bytes of spill file"
                    f" ({error.strerror}): free some space, choose another disk_path,"
                    " or raise host_budget",
                    str(folder),
                ) from error

    @property
    def num_bytes(self) -> int:
        """Bytes reserved."""
        return len(self._checksums) * self._extent_bytes

    def write(self, extents: npt.NDArray[np.int32], blocks: Sequence[_Buffer]) -> None:
        """Write blocks to extents; returns when all of them are in the file.

        Raises:
            SpillError: the write failed; the extents hold nothing readable.
        """
        self._written[extents] = False
        for first, run in _runs(extents, blocks):
            self._all_of(os.pwritev, run, first, "write")
        for extent, block in zip(extents, blocks, strict=True):
            self._checksums[extent] = _checksum(block)
        self._written[extents] = True

    def read(self, extents: npt.NDArray[np.int32], blocks: Sequence[_Buffer]) -> None:
        """Read extents into buffers; returns when all are filled and verified.

        Raises:
            CorruptBlockError: an extent does not hold what was written to it.
            SpillError: the read failed.
        """
        for first, run in _runs(extents, blocks):
            self._all_of(os.preadv, run, first, "read")
        for extent, block in zip(extents, blocks, strict=True):
            if not self._written[extent] or self._checksums[extent] != _checksum(block):
                raise CorruptBlockError(
                    errno.EIO,
                    f"block in extent {extent} of the spill file does not match its checksum",
                    str(self._folder),
                )

    def close(self) -> None:
        """Close the file; its space is free at once. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _all_of(self, call: _Vectored, run: list[_Buffer], first: int, verb: str) -> None:
        """Transfer a run of neighbouring extents whole: the kernel may stop short of the end."""
        offset, done, total = first * self._extent_bytes, 0, len(run) * self._extent_bytes
        while done < total:
            skip, within = divmod(done, self._extent_bytes)
            rest = [run[skip][within:], *run[skip + 1 :]]
            try:
                moved = call(self._fd, rest, offset + done)
            except OSError as error:
                raise SpillError(
                    error.errno,
                    f"cannot {verb} a block: {error.strerror}",
                    str(self._folder),
                ) from error
            if moved == 0:
                raise SpillError(
                    errno.EIO,
                    f"cannot {verb} a block: the spill file ends early",
                    str(self._folder),
                )
            done += moved


def _runs(
    extents: npt.NDArray[np.int32], blocks: Sequence[_Buffer]
) -> Iterator[tuple[int, list[_Buffer]]]:
    """Group neighbouring extents, so that each run is one system call."""
    start = 0
    for end in range(1, len(extents) + 1):
        if end == len(extents) or extents[end] != extents[end - 1] + 1 or end - start == _MAX_RUN:
            yield int(extents[start]), list(blocks[start:end])
            start = end


def _checksum(block: _Buffer) -> int:
    return xxhash.xxh3_64_intdigest(block.data)


def _open_unnamed(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise _unusable(folder, error) from error
    try:
        fd, name = tempfile.mkstemp(prefix="specoffload-", suffix=".spill", dir=folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    Path(name).unlink()
    return fd


def _unusable(folder: Path, error: OSError) -> SpillError:
    return SpillError(
        error.errno,
        f"disk_path cannot hold a spill file ({error.strerror}):"
        " name an existing folder that this user may write to",
        str(folder),
    )
