"""The definition of gathering blocks: one copy a block."""

from __future__ import annotations

import torch


def gather_blocks(arena: torch.Tensor, slots_n: torch.Tensor, run: torch.Tensor) -> None:
    """Copy slot ``slots_n[i]`` of the arena to place i of the run; -1 leaves the place alone."""
    for i, slot in enumerate(slots_n.tolist()):
        if slot >= 0:
            run[i] = arena[slot]
