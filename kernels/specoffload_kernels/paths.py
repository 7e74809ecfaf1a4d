"""Says which path each operation takes, for a person to read."""

from __future__ import annotations

import torch

from specoffload_kernels.gpu import gpu_path
from specoffload_kernels.registry import OPERATIONS
from specoffload_kernels.selection import selected


def backend() -> str:
    """Name the path that attention on the CPU takes.

    One of "native-avx512", "native-avx2", "native-portable" and "torch".
    """
    return selected().backend


def describe() -> dict[str, object]:
    """Say which path attention on the CPU takes and why, for a person to read.

    Keys: ``backend``; ``reason``; ``library``, the path of the native library or None;
    ``threads``, whose threads it runs on or why it runs on one.
    """
    selection = selected()
    library = selection.library
    return {
        "backend": selection.backend,
        "reason": selection.reason,
        "library": None if library is None else str(library.path),
        "threads": (library.threads_reason if library is not None else None) or "torch's",
    }


def operation_paths() -> dict[str, dict[str, str]]:
    """Return, for each device that is here, the path of every operation, for a person to read.

    A path on the GPU that is not Triton comes with its reason.
    """
    native = backend()
    paths = {"cpu": {op.name: native if op.is_native else "torch" for op in OPERATIONS.values()}}
    if torch.cuda.is_available():
        paths["cuda"] = {name: str(gpu_path(name)) for name in OPERATIONS}
    return paths
