"""The definition of block mass, in float64."""

from __future__ import annotations

import torch


def block_mass(
    block_lse: torch.Tensor, lse: torch.Tensor, num_kv_heads: int, num_rows: torch.Tensor
) -> torch.Tensor:
    """Return the mean over a kv head's query heads and used rows of exp(block_lse - lse)."""
    mass = torch.zeros(*block_lse.shape[:-3], num_kv_heads, block_lse.shape[-1]).double()
    share = (block_lse.double().exp() / lse.double().exp()[..., None]).nan_to_num(0.0)
    for b, used in enumerate(num_rows.tolist()):
        if used:
            rows = torch.unflatten(share[..., b, :, :used, :], -3, (num_kv_heads, -1))
            mass[..., b, :, :] = rows.mean((-3, -2))
    return mass
