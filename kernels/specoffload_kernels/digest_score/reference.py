"""The definition of a block's score by its digest, in float64."""

from __future__ import annotations

import torch

from specoffload_kernels.digests import DigestRule, Digests, DigestScore


def digest_score(
    q_BHQD: torch.Tensor,
    digests: Digests,
    table_BN: torch.Tensor,
    q_start_B: torch.Tensor,
    kv_len_B: torch.Tensor,
    *,
    rule: DigestRule,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> DigestScore:
    """Return log sum exp over each block's visible tokens, of logits by what the digest knows."""
    num_heads, num_planes, block_size = digests.codes_NHWTP.shape[1:4]
    index_BN = table_BN.clamp(min=0).long()
    low, high, mean = (
        x[index_BN].double().transpose(1, 2)[:, :, None]  # [B, H, 1, N, D]
        for x in (digests.low_NHD, digests.high_NHD, digests.mean_NHD)
    )
    q_BHGQD = torch.unflatten(scale * q_BHQD.double(), 1, (num_heads, -1))
    q_BHRD = q_BHGQD.flatten(2, 3)
    q_BHR1D = q_BHRD[:, :, :, None]

    pos_NT = torch.arange(index_BN.shape[1] * block_size).view(-1, block_size)
    q_pos_BQ11 = (q_start_B[:, None] + torch.arange(q_BHQD.shape[2]))[:, :, None, None]
    seen_BQNT = (pos_NT <= q_pos_BQ11) & (pos_NT < kv_len_B[:, None, None, None])
    seen_BQNT &= (table_BN >= 0)[:, None, :, None]
    seen_BQNT &= (torch.arange(block_size) < digests.num_tokens_N[index_BN][..., None])[:, None]
    if window is not None:
        seen_BQNT &= pos_NT > q_pos_BQ11 - window

    def block_lse(s_BHRNT: torch.Tensor) -> torch.Tensor:
        s_BHQNT = torch.unflatten(s_BHRNT, 2, (-1, q_BHQD.shape[2])).flatten(1, 2)
        if softcap is not None:
            s_BHQNT = softcap * torch.tanh(s_BHQNT / softcap)
        return s_BHQNT.masked_fill(~seen_BQNT[:, None], -torch.inf).logsumexp(-1)

    if rule is DigestRule.MEAN:
        s_BHRN1 = (q_BHR1D * mean).sum(-1, keepdim=True)
        return DigestScore(estimate_BHQN=block_lse(s_BHRN1), upper_BHQN=None)
    if rule is DigestRule.BOX:
        s_BHRN1 = torch.maximum(q_BHR1D * low, q_BHR1D * high).sum(-1, keepdim=True)
        return DigestScore(estimate_BHQN=block_lse(s_BHRN1), upper_BHQN=block_lse(s_BHRN1))
    planes_NHWTD = (digests.codes_NHWTP[..., None] >> torch.arange(8) & 1).flatten(-2)
    weight_W = 2 ** torch.arange(num_planes - 1, -1, -1)
    codes_NHTD = (planes_NHWTD * weight_W[:, None, None]).sum(2)[..., : q_BHQD.shape[3]]
    codes_BHNTD = codes_NHTD[index_BN].transpose(1, 2)
    step_BHN1D = (high - low)[:, :, 0, :, None] / 2**num_planes
    k_BHNTD = low[:, :, 0, :, None] + (codes_BHNTD + 0.5) * step_BHN1D
    s_BHRNT = torch.einsum("bhrd,bhntd->bhrnt", q_BHRD, k_BHNTD)
    residual_BH1NT = digests.residual_NHT[index_BN].double().transpose(1, 2)[:, :, None]
    slack_BHRNT = q_BHRD.norm(dim=-1)[..., None, None] * residual_BH1NT
    return DigestScore(
        estimate_BHQN=block_lse(s_BHRNT), upper_BHQN=block_lse(s_BHRNT + slack_BHRNT)
    )
