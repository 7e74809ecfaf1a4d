"""Slots as rows of integers, so that every bit pattern is moved as it is."""

from __future__ import annotations

import math

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(
    arena: torch.Tensor, slots_n: torch.Tensor, run: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the arena ``[S, W]`` and of the run's first n places ``[n, W]``.

    Raises:
        ValueError: Arena, slots and run do not fit each other, or a slot is not contiguous.
    """
    num_slots = slots_n.shape[0]
    if (
        slots_n.dim() != 1
        or slots_n.dtype not in (torch.int32, torch.int64)
        or run.dtype != arena.dtype
        or run.shape[1:] != arena.shape[1:]
        or run.shape[0] < num_slots
    ):
        raise ValueError(
            f"arena {tuple(arena.shape)} of {arena.dtype} [S, ...], slots {tuple(slots_n.shape)} "
            f"of {slots_n.dtype} [n] and run {tuple(run.shape)} of {run.dtype} [>= n, ...] do not "
            "fit each other; slots must be int32 or int64"
        )
    run = run[:num_slots]
    for tensor in (arena, run):
        if tensor.shape[0] and not tensor[0].is_contiguous():
            raise ValueError(
                f"strides {tensor.stride()} of shape {tuple(tensor.shape)}: each slot must be "
                "contiguous"
            )
    return _rows(arena), _rows(run)


def known(slots_n: torch.Tensor, arena_SW: torch.Tensor) -> torch.Tensor:
    """Return the slots as indices.

    Raises:
        IndexError: The arena lacks one.
    """
    if slots_n.numel() and int(slots_n.max()) >= arena_SW.shape[0]:
        raise IndexError(f"slot {int(slots_n.max())} of an arena of {arena_SW.shape[0]}")
    return slots_n.long()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    size = (tensor.shape[0], math.prod(tensor.shape[1:]))
    rows = tensor.as_strided(size, (tensor.stride(0), 1))
    return rows.view(_INTEGERS[tensor.element_size()])
