"""The definition of paged attention, in float64; slow, and what every other path is tested against.

B rows, Hq query heads, H kv heads, G = Hq // H, Q query tokens, D head_dim, S slots, N blocks,
T tokens per block.
"""

from __future__ import annotations

import torch

from specoffload_kernels.part import AttentionPart


def paged_attention(
    q_BHQD: torch.Tensor,
    arena_S2HTD: torch.Tensor,
    table_BN: torch.Tensor,
    q_start_B: torch.Tensor,
    kv_len_B: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    with_block_lse: bool = True,
) -> AttentionPart:
    """Return softmax(scale * q k) v over the visible tokens, in float64.

    Token t of block j is at position j * T + t. Query i of row b sees it if the block has a slot,
    the position is below ``kv_len_B[b]``, not after the query's own position ``q_start_B[b] + i``,
    and less than ``window`` behind it.
    """
    groups = q_BHQD.shape[1] // arena_S2HTD.shape[2]
    kv_BN2HTD = arena_S2HTD[table_BN.clamp(min=0).long()].double()
    k_BHNTD, v_BHNTD = kv_BN2HTD.permute(2, 0, 3, 1, 4, 5).repeat_interleave(groups, dim=2)

    pos_NT = torch.arange(k_BHNTD.shape[2] * k_BHNTD.shape[3]).view(k_BHNTD.shape[2:4])
    q_pos_BQ11 = (q_start_B[:, None] + torch.arange(q_BHQD.shape[2]))[:, :, None, None]
    seen_BQNT = (pos_NT <= q_pos_BQ11) & (pos_NT < kv_len_B[:, None, None, None])
    seen_BQNT &= (table_BN >= 0)[:, None, :, None]
    if window is not None:
        seen_BQNT &= pos_NT > q_pos_BQ11 - window
    v_BHNTD = v_BHNTD.masked_fill(~seen_BQNT.any(1)[:, None, :, :, None], 0.0)

    s_BHQNT = torch.einsum("bhqd,bhntd->bhqnt", q_BHQD.double(), k_BHNTD) * scale
    if softcap is not None:
        s_BHQNT = softcap * torch.tanh(s_BHQNT / softcap)
    s_BHQNT = s_BHQNT.masked_fill(~seen_BQNT[:, None], -torch.inf)
    lse_BHQ = s_BHQNT.flatten(-2).logsumexp(-1)
    p_BHQNT = torch.exp(s_BHQNT - lse_BHQ.masked_fill(lse_BHQ.isneginf(), 0.0)[..., None, None])
    out_BQHD = torch.einsum("bhqnt,bhntd->bqhd", p_BHQNT, v_BHNTD)
    block_lse_BHQN = s_BHQNT.logsumexp(-1) if with_block_lse else None
    return AttentionPart(out_BQHD=out_BQHD, lse_BHQ=lse_BHQ, block_lse_BHQN=block_lse_BHQN)
