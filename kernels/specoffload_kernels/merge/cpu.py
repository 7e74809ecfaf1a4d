"""Merge on the CPU: the native library, else operations of torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specoffload_kernels.merge import elementwise
from specoffload_kernels.part import AttentionPart
from specoffload_kernels.selection import selected


def merge(parts: Sequence[AttentionPart], *, sinks_H: torch.Tensor | None = None) -> AttentionPart:
    """Combine parts; see ``specoffload_kernels.merge``."""
    library = selected().library
    if library is None:
        return elementwise.merge(parts, sinks_H=sinks_H)
    return library.merge(parts, sinks_H)
