"""The definition of scattering blocks: one copy a block."""

from __future__ import annotations

import torch


def scatter_blocks(arena: torch.Tensor, slots_n: torch.Tensor, run: torch.Tensor) -> None:
    """Copy place i of the run to slot ``slots_n[i]`` of the arena; -1 skips the place."""
    for i, slot in enumerate(slots_n.tolist()):
        if slot >= 0:
            arena[slot] = run[i]
