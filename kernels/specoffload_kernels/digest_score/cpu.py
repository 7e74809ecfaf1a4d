"""Scores by digests in torch, on any device: a bounded number of blocks at a time.

B rows, Hq query heads, H kv heads, R = Hq / H * Q packed rows, D head_dim, M digests, N blocks of
the table, n of them in a step, T tokens per block, W bit planes of P bytes.
"""

from __future__ import annotations

import torch

from specoffload_kernels.digests import DigestRule, Digests, DigestScore

_STEP_BYTES = 4 << 20  # bound on the keys, and on the logits, of one step: what a cache holds
_SPREAD = torch.tensor(
    [sum((byte >> bit & 1) << 8 * bit for bit in range(8)) for byte in range(256)]
)


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
    """Score blocks by their digests; see ``specoffload_kernels.digest_score``."""
    num_rows, _, num_q, head_dim = q_BHQD.shape
    num_heads, _, block_size = digests.codes_NHWTP.shape[1:4]
    num_blocks = table_BN.shape[1]
    q_BHRD = torch.unflatten(q_BHQD.float() * scale, 1, (num_heads, -1)).flatten(2, 3)
    norm_BHR11 = q_BHRD.norm(dim=-1)[..., None, None]
    q_pos_BQ11 = (q_start_B[:, None] + torch.arange(num_q, device=q_BHQD.device))[..., None, None]
    end_BQ11 = torch.minimum(kv_len_B[:, None, None, None], q_pos_BQ11 + 1)

    def block_lse(s_BHRnT: torch.Tensor, seen_BQnT: torch.Tensor) -> torch.Tensor:
        if softcap is not None:
            s_BHRnT = softcap * torch.tanh(s_BHRnT / softcap)
        s_BHQnT = torch.unflatten(s_BHRnT, 2, (-1, num_q)).flatten(1, 2)
        return s_BHQnT.masked_fill(~seen_BQnT[:, None], -torch.inf).logsumexp(-1)

    estimates, uppers = [], []
    token_bytes = 4 * num_rows * num_heads * max(head_dim, q_BHRD.shape[2])
    step = max(1, _STEP_BYTES // max(1, token_bytes * block_size))
    for j in range(0, max(1, num_blocks), step):
        table_Bn = table_BN[:, j : j + step]
        index_Bn = table_Bn.clamp(min=0).long()
        first, last = j * block_size, (j + table_Bn.shape[1]) * block_size
        pos_nT = torch.arange(first, last, device=q_BHQD.device).view(-1, block_size)
        seen_BQnT = pos_nT < end_BQ11
        if window is not None:
            seen_BQnT &= pos_nT > q_pos_BQ11 - window
        # An absent block is given the entries of another one, of which none is seen.
        num_tokens_Bn = digests.num_tokens_N[index_Bn].masked_fill(table_Bn < 0, 0)
        seen_BQnT &= (pos_nT % block_size < num_tokens_Bn[..., None])[:, None]
        if rule is DigestRule.SHADOW:
            s_BHRnT = _shadow_logits(q_BHRD, digests, index_Bn)
            residual_BH1nT = _gather(digests.residual_NHT, index_Bn)[:, :, None]
            estimates.append(block_lse(s_BHRnT, seen_BQnT))
            uppers.append(block_lse(s_BHRnT.addcmul_(norm_BHR11, residual_BH1nT), seen_BQnT))
        elif rule is DigestRule.BOX:
            s_BHRn1 = _logits(q_BHRD.clamp(max=0), _gather(digests.low_NHD, index_Bn)[..., None, :])
            s_BHRn1 += _logits(
                q_BHRD.clamp(min=0), _gather(digests.high_NHD, index_Bn)[..., None, :]
            )
            estimates.append(block_lse(s_BHRn1, seen_BQnT))
        else:
            s_BHRn1 = _logits(q_BHRD, _gather(digests.mean_NHD, index_Bn)[..., None, :])
            estimates.append(block_lse(s_BHRn1, seen_BQnT))
    estimate_BHQN = torch.cat(estimates, -1)
    upper_BHQN = torch.cat(uppers, -1) if uppers else None
    if rule is DigestRule.BOX:
        upper_BHQN = estimate_BHQN
    return DigestScore(estimate_BHQN=estimate_BHQN, upper_BHQN=upper_BHQN)


def _gather(x_MH: torch.Tensor, index_Bn: torch.Tensor) -> torch.Tensor:
    """Return the chosen entries as float32, ``[B, H, n, ...]``."""
    return x_MH[index_Bn].transpose(1, 2).float()


def _logits(q_BHRD: torch.Tensor, k_BHnTD: torch.Tensor) -> torch.Tensor:
    num_n, num_t = k_BHnTD.shape[2:4]
    s_BHRK = torch.matmul(q_BHRD, k_BHnTD.flatten(2, 3).transpose(-1, -2))
    return torch.unflatten(s_BHRK, 3, (num_n, num_t))


def _shadow_logits(q_BHRD: torch.Tensor, digests: Digests, index_Bn: torch.Tensor) -> torch.Tensor:
    """Return the logits of keys read back as ``low + (code + 0.5) * step``.

    The query takes the step, so that the codes are multiplied as they are.
    """
    low_BHnD = _gather(digests.low_NHD, index_Bn)
    box_BHnD = _gather(digests.high_NHD, index_Bn) - low_BHnD
    step_BHnD = box_BHnD / 2 ** digests.codes_NHWTP.shape[2]
    q_BHnRD = q_BHRD[:, :, None] * step_BHnD[:, :, :, None]
    s_BHnRT = torch.matmul(q_BHnRD, _codes(digests, index_Bn).transpose(-1, -2))
    first_BHRn = torch.matmul(q_BHRD, (low_BHnD + 0.5 * step_BHnD).transpose(-1, -2))
    return s_BHnRT.transpose(2, 3).add_(first_BHRn[..., None])


def _codes(digests: Digests, index_Bn: torch.Tensor) -> torch.Tensor:
    """Return the codes as numbers, ``[B, H, n, T, D]`` float32."""
    planes_BHnWTP = digests.codes_NHWTP[index_Bn].transpose(1, 2)
    num_planes, head_dim = planes_BHnWTP.shape[3], digests.low_NHD.shape[2]
    # A byte's bits spread over eight bytes, of which one int64 holds the codes of eight channels.
    spread_256 = _SPREAD.to(planes_BHnWTP.device)
    bits_BHnWTP = spread_256.index_select(0, planes_BHnWTP.flatten().int()).view_as(planes_BHnWTP)
    codes_BHnTP = bits_BHnWTP.new_zeros((*planes_BHnWTP.shape[:3], *planes_BHnWTP.shape[4:]))
    for w in range(num_planes):
        codes_BHnTP.mul_(2).add_(bits_BHnWTP[:, :, :, w])
    return codes_BHnTP.view(torch.uint8)[..., :head_dim].float()
