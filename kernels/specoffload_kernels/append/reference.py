"""The definition of append: one assignment a token."""

from __future__ import annotations

import torch


def append(
    arena_S2HTD: torch.Tensor,
    k_BHQD: torch.Tensor,
    v_BHQD: torch.Tensor,
    slots_BQ: torch.Tensor,
    offsets_BQ: torch.Tensor,
) -> None:
    """Write token i of row b to position ``offsets_BQ[b, i]`` of slot ``slots_BQ[b, i]``.

    Slot -1 skips the token.
    """
    for b, (slots, offsets) in enumerate(zip(slots_BQ.tolist(), offsets_BQ.tolist(), strict=True)):
        for i, (slot, offset) in enumerate(zip(slots, offsets, strict=True)):
            if slot >= 0:
                arena_S2HTD[slot, 0, :, offset] = k_BHQD[b, :, i]
                arena_S2HTD[slot, 1, :, offset] = v_BHQD[b, :, i]
