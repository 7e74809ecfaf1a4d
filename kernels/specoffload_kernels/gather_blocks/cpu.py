"""Gathering of blocks in torch, on any device."""

from __future__ import annotations

import torch

from specoffload_kernels.gather_blocks.integers import as_integers, known


def gather_blocks(arena: torch.Tensor, slots_n: torch.Tensor, run: torch.Tensor) -> None:
    """Copy slot ``slots_n[i]`` of the arena to place i of the run; -1 leaves the place alone.

    Every bit is kept, those of NaNs included.

    Args:
        arena: ``[S, ...]``, each slot contiguous.
        slots_n: int32 or int64, ``[n]``.
        run: At least n places of the arena's type and trailing shape, each contiguous; written in
            place.

    Raises:
        ValueError: Shapes or types do not fit each other, or a slot is not contiguous.
        IndexError: The arena lacks a slot; nothing was written.
    """
    arena_SW, run_nW = as_integers(arena, slots_n, run)
    here_n = slots_n >= 0
    run_nW[here_n] = arena_SW[known(slots_n[here_n], arena_SW)]
