"""Append in plain torch, on any device: one scattered write each for K and V."""

from __future__ import annotations

import torch


def append(
    arena_S2HTD: torch.Tensor,
    k_BHQD: torch.Tensor,
    v_BHQD: torch.Tensor,
    slots_BQ: torch.Tensor,
    offsets_BQ: torch.Tensor,
) -> None:
    """Write new tokens to their slots; see ``specoffload_kernels.append``."""
    slots_n, offsets_n = slots_BQ.flatten().long(), offsets_BQ.flatten().long()
    k_nHD = k_BHQD.transpose(1, 2).flatten(0, 1)
    v_nHD = v_BHQD.transpose(1, 2).flatten(0, 1)
    kept_n = slots_n >= 0
    slots_n, offsets_n = slots_n[kept_n], offsets_n[kept_n]
    if offsets_n.numel() and int(offsets_n.min()) < 0:  # torch would count it from the end
        raise IndexError(f"offset {int(offsets_n.min())} of a token that has a slot")
    k_STHD, v_STHD = arena_S2HTD.permute(1, 0, 3, 2, 4)
    k_STHD.index_put_((slots_n, offsets_n), k_nHD[kept_n].to(arena_S2HTD.dtype))
    v_STHD.index_put_((slots_n, offsets_n), v_nHD[kept_n].to(arena_S2HTD.dtype))
