"""The value that attention over some of the blocks returns; knows shapes, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class AttentionPart:
    """Attention over a set of blocks, normalised over that set alone, and what merges it exactly.

    Two parts over disjoint sets of blocks combine by their log-sum-exp (see ``merge``).

    Attributes:
        out_BQHD: ``[rows, query tokens, query heads, head_dim]`` float32, contiguous; 0 where a
            query saw nothing.
        lse_BHQ: ``[rows, query heads, query tokens]`` float32, natural log of the softmax
            denominator; -inf where a query saw nothing.
        block_lse_BHQN: ``[rows, query heads, query tokens, blocks]`` float32, the same per block;
            -inf where the block is absent or invisible. None if it was not asked for.
    """

    out_BQHD: torch.Tensor  # noqa: N815 - the suffix is the shape
    lse_BHQ: torch.Tensor  # noqa: N815
    block_lse_BHQN: torch.Tensor | None  # noqa: N815
