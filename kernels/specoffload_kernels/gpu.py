"""Which path an operation takes on a GPU: its Triton kernel or torch; decided once, and why."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GpuPath:
    """A path and why it was chosen.

    Attributes:
        backend: "triton" or "torch".
        reason: One sentence for the user.
        kernel: The function of the operation's ``triton.py``, or None for the torch path.
    """

    backend: str
    reason: str
    kernel: Callable[..., Any] | None

    def __str__(self) -> str:
        """Return the path, with the reason where it is a fallback."""
        return self.backend if self.kernel is not None else f"{self.backend} ({self.reason})"


@functools.cache
def gpu_path(name: str) -> GpuPath:
    """Return the path of operation ``name``. The first call imports Triton: about a second."""
    module = f"{__package__}.{name}.triton"
    if importlib.util.find_spec(module) is None:
        return GpuPath(backend="torch", reason="it has no Triton kernel", kernel=None)
    try:
        kernel = getattr(importlib.import_module(module), name)
    except ImportError as error:
        reason = f"cannot import Triton: {error}"
        _LOGGER.warning("%s on the GPU uses the slower torch path: %s", name, reason)
        return GpuPath(backend="torch", reason=reason, kernel=None)
    return GpuPath(backend="triton", reason="Triton is installed", kernel=kernel)
