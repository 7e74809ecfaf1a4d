"""The definition of merge, in float64: sums of unnormalised numerators and denominators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specoffload_kernels.part import AttentionPart


def merge(parts: Sequence[AttentionPart], *, sinks_H: torch.Tensor | None = None) -> AttentionPart:
    """Return the attention over the union of the parts' blocks; sinks only dilute ``out_BQHD``."""
    weight_PBHQ = torch.stack([part.lse_BHQ.double() for part in parts]).exp()
    out_PBQHD = torch.stack([part.out_BQHD.double() for part in parts])
    total_BHQ = weight_PBHQ.sum(0)
    diluted_BHQ = total_BHQ if sinks_H is None else total_BHQ + sinks_H.double().exp()[:, None]
    share_PBHQ = (weight_PBHQ / diluted_BHQ).nan_to_num(0.0)
    blocks = [part.block_lse_BHQN.double() for part in parts if part.block_lse_BHQN is not None]
    return AttentionPart(
        out_BQHD=(share_PBHQ.transpose(2, 3)[..., None] * out_PBQHD).sum(0),
        lse_BHQ=total_BHQ.log(),
        block_lse_BHQN=torch.stack(blocks).amax(0) if len(blocks) == len(parts) else None,
    )
