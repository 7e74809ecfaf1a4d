"""Merge in torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specoffload_kernels.part import AttentionPart


def merge(parts: Sequence[AttentionPart], *, sinks_H: torch.Tensor | None = None) -> AttentionPart:
    """Combine parts; see ``specoffload_kernels.merge``."""
    lse_BHQ = parts[0].lse_BHQ.clone()
    for part in parts[1:]:
        lse_BHQ = torch.logaddexp(lse_BHQ, part.lse_BHQ)
    norm_BHQ = lse_BHQ
    if sinks_H is not None:
        norm_BHQ = torch.logaddexp(lse_BHQ, sinks_H.float()[:, None])
    # A query that saw nothing has -inf on both sides of the difference.
    norm_BHQ = norm_BHQ.masked_fill(norm_BHQ.isneginf(), 0.0)

    out_BQHD: torch.Tensor | None = None
    for part in parts:
        share_BQH1 = torch.exp(part.lse_BHQ - norm_BHQ).transpose(1, 2)[..., None]
        if out_BQHD is None:
            out_BQHD = part.out_BQHD * share_BQH1
        else:
            out_BQHD.addcmul_(part.out_BQHD, share_BQH1)
    assert out_BQHD is not None

    block_lses = [part.block_lse_BHQN for part in parts if part.block_lse_BHQN is not None]
    block_lse_BHQN = None
    if len(block_lses) == len(parts):
        block_lse_BHQN = block_lses[0].clone()
        for other_BHQN in block_lses[1:]:
            block_lse_BHQN = torch.maximum(block_lse_BHQN, other_BHQN)
    return AttentionPart(out_BQHD=out_BQHD, lse_BHQ=lse_BHQ, block_lse_BHQN=block_lse_BHQN)
