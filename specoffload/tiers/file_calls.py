"""The system calls of a spill file, in one object, so that a fault can be put in between."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class FileCalls:
    """What a spill file asks of the operating system. Every method raises `OSError`."""

    def open_unnamed(self, folder: Path) -> int:
        """Open a new file without a name, for its owner only; return its descriptor."""
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
        fd, name = tempfile.mkstemp(prefix="specoffload-", suffix=".spill", dir=folder)
        Path(name).unlink()
        return fd

    def reserve(self, fd: int, num_bytes: int) -> None:
        """Make sure that so many bytes can be written."""
        os.posix_fallocate(fd, 0, num_bytes)

    def bypass_page_cache(self, fd: int) -> None:
        """Let reads and writes go past the page cache from now on (O_DIRECT)."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Write buffers one after another; return how many bytes were written."""
        return os.pwritev(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Fill buffers one after another; return how many bytes were read."""
        return os.preadv(fd, buffers, offset)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)
