"""Append on the CPU: the native library, else one scattered write each for K and V in torch."""

from __future__ import annotations

import torch

from specoffload_kernels.append import scattered
from specoffload_kernels.selection import selected


def append(
    arena_S2HTD: torch.Tensor,
    k_BHQD: torch.Tensor,
    v_BHQD: torch.Tensor,
    slots_BQ: torch.Tensor,
    offsets_BQ: torch.Tensor,
) -> None:
    """Write new tokens to their slots; see ``specoffload_kernels.append``."""
    library = selected().library
    if library is None or arena_S2HTD.stride(4) != 1:
        scattered.append(arena_S2HTD, k_BHQD, v_BHQD, slots_BQ, offsets_BQ)
    else:
        library.append(arena_S2HTD, k_BHQD, v_BHQD, slots_BQ, offsets_BQ)
