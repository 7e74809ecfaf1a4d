"""The disk tier: one spill file of fixed-size extents, each with a checksum.

The file has no name while it is in use, so that nothing stays behind whatever happens to the
process. Its space is reserved before it is written: a full disk is an error here, at the start, and
not a signal later. A block is never served unless its checksum matches.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from specoffload.errors import CorruptBlockError, SpillError
from specoffload.tiers.access import Span
from specoffload.tiers.file_calls import FileCalls
from specoffload.tiers.ram import PAGE, allocate

_Buffer: TypeAlias = npt.NDArray[np.uint8]
_Vectored: TypeAlias = Callable[[int, Sequence[Any], int], int]
_MAX_RUN: Final = 256
"""Most extents in one system call; IOV_MAX is 1,024."""
_numbers = itertools.count()


class SpillFile:
    """`num_extents` places of `extent_bytes` bytes in an unnamed file, readable by its owner only.

    Args:
        folder: where the file lies.
        extent_bytes: size of one block.
        num_extents: how many the file is made to hold.
        direct: go past the page cache. Extents are a multiple of `PAGE` then, and every buffer
            starts at one.
        calls: the system calls.

    Raises:
        SpillError: the folder cannot be written to, has no room for the file, or lies on a file
            system that cannot go past the page cache.
    """

    def __init__(
        self,
        folder: Path,
        extent_bytes: int,
        num_extents: int,
        *,
        direct: bool = False,
        calls: FileCalls | None = None,
    ) -> None:
        assert not direct or extent_bytes % PAGE == 0, "direct I/O moves whole pages"
        self._folder = folder
        self._space = f"spill file {next(_numbers)}"
        self._extent_bytes = extent_bytes
        self._direct = direct
        self._calls = FileCalls() if calls is None else calls
        self._checksums = np.zeros(num_extents, np.uint64)
        self._written = np.zeros(num_extents, bool)
        try:
            self._fd = self._calls.open_unnamed(folder)
        except OSError as error:
            raise self._error(
                error,
                f"disk_path cannot hold a spill file ({error.strerror}):"
                " name an existing folder that this user may write to",
            ) from error
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes reserved."""
        return len(self._checksums) * self._extent_bytes

    def span(self, extents: npt.NDArray[np.int32]) -> Span:
        """Return where some extents lie, for the record of accesses."""
        starts = extents.astype(np.int64) * self._extent_bytes
        return Span(space=self._space, starts=starts, size=self._extent_bytes)

    def write(self, extents: npt.NDArray[np.int32], blocks: Sequence[_Buffer]) -> None:
        """Write blocks to extents; returns when all of them are in the file.

        Raises:
            SpillError: the write failed; the extents hold nothing readable.
        """
        self._written[extents] = False
        for first, run in _runs(extents, blocks):
            self._all_of(self._calls.write, run, first, "write")
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
            self._all_of(self._calls.read, run, first, "read")
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
            self._calls.close(self._fd)
            self._fd = -1

    def _prepare(self) -> None:
        """Reserve the space, and see whether the file system does what is asked of it."""
        if self.num_bytes:
            try:
                self._calls.reserve(self._fd, self.num_bytes)
            except OSError as error:
                raise self._error(
                    error,
                    f"cannot reserve {self.num_bytes} bytes of spill file"
                    f" ({error.strerror}): free some space, choose another disk_path,"
                    " or raise host_budget",
                ) from error
        if self._direct:
            try:
                self._calls.bypass_page_cache(self._fd)
                # Some file systems take the flag, and refuse the first transfer.
                if self.num_bytes:
                    self._calls.read(self._fd, [allocate(PAGE).numpy()], 0)
            except OSError as error:
                raise self._error(
                    error,
                    f"the file system of disk_path has no direct I/O ({error.strerror}):"
                    " set disk_io to 'buffered' or 'auto', or choose another disk_path",
                ) from error

    def _all_of(self, call: _Vectored, run: list[_Buffer], first: int, verb: str) -> None:
        """Transfer a run of neighbouring extents whole: the kernel may stop short of the end."""
        offset, done, total = first * self._extent_bytes, 0, len(run) * self._extent_bytes
        while done < total:
            skip, within = divmod(done, self._extent_bytes)
            rest = [run[skip][within:], *run[skip + 1 :]]
            try:
                moved = call(self._fd, rest, offset + done)
            except OSError as error:
                raise self._error(error, f"cannot {verb} a block: {error.strerror}") from error
            if self._direct:
                moved -= moved % PAGE  # what follows must start at a page again
            if moved <= 0:
                raise SpillError(
                    errno.EIO,
                    f"cannot {verb} a block: the spill file ends early",
                    str(self._folder),
                )
            done += moved

    def _error(self, cause: OSError, message: str) -> SpillError:
        return SpillError(cause.errno, message, str(self._folder))


def direct_io_problem(folder: Path) -> str | None:
    """Return why a folder's files cannot go past the page cache; None if they can.

    Raises:
        SpillError: the folder cannot hold a spill file at all.
    """
    SpillFile(folder, PAGE, 1).close()
    try:
        SpillFile(folder, PAGE, 1, direct=True).close()
    except SpillError as error:
        return str(error.__cause__)
    return None


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
