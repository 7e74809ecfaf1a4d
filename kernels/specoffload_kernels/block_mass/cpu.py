"""Block mass in torch, on any device."""

from __future__ import annotations

import torch


def block_mass(
    block_lse: torch.Tensor, lse: torch.Tensor, num_kv_heads: int, num_rows: torch.Tensor
) -> torch.Tensor:
    """Reduce per-block sums to masses; see ``specoffload_kernels.block_mass``."""
    num_rows_B = num_rows.to(lse.device)
    used_BQ = torch.arange(lse.shape[-1], device=lse.device) < num_rows_B[:, None]
    weight_B = 1.0 / (num_rows_B.clamp(min=1) * (lse.shape[-2] // num_kv_heads)).float()
    # Rows that saw nothing give -inf - -inf, and rows that are not used may hold anything.
    ignored = ~used_BQ[:, None, :] | lse.isneginf()
    share = torch.exp(block_lse - lse[..., None]).masked_fill_(ignored[..., None], 0.0)
    mass = torch.unflatten(share, -3, (num_kv_heads, -1)).sum((-3, -2))
    return mass * weight_B[:, None, None]
