"""Scattering of blocks in torch, on any device."""

from __future__ import annotations

import torch

from specoffload_kernels.gather_blocks.integers import as_integers, known


def scatter_blocks(arena: torch.Tensor, slots_n: torch.Tensor, run: torch.Tensor) -> None:
    """Copy place i of the run to slot ``slots_n[i]`` of the arena; -1 skips the place.

    Every bit is kept, those of NaNs included.

    Args:
        arena: ``[S, ...]``, each slot contiguous; written in place.
        slots_n: int32 or int64, ``[n]``; no slot twice.
        run: At least n places of the arena's type and trailing shape, each contiguous.

    Raises:
        ValueError: Shapes or types do not fit each other, or a slot is not contiguous.
        IndexError: The arena lacks a slot; nothing was written.
    """
    arena_SW, run_nW = as_integers(arena, slots_n, run)
    here_n = slots_n >= 0
    arena_SW[known(slots_n[here_n], arena_SW)] = run_nW[here_n]
