"""The definition of a digest, in float64."""

from __future__ import annotations

import torch

from specoffload_kernels.digests import Digests


def digest(
    arena_S2HTD: torch.Tensor, slots_N: torch.Tensor, num_tokens_N: torch.Tensor, *, bits: int
) -> Digests:
    """Summarise the first ``num_tokens_N[n]`` keys of slot ``slots_N[n]``; none of slot -1."""
    num, (_, _, num_heads, block_size, head_dim) = len(slots_N), arena_S2HTD.shape
    low, high, mean = torch.zeros(3, num, num_heads, head_dim).double()
    codes = torch.zeros(num, num_heads, block_size, 8 * -(-head_dim // 8), dtype=torch.uint8)
    residual = torch.zeros(num, num_heads, block_size).double()
    used_N = num_tokens_N.masked_fill(slots_N < 0, 0)
    for n, (slot, t) in enumerate(zip(slots_N.tolist(), used_N.tolist(), strict=True)):
        if t:
            k_HtD = arena_S2HTD[slot, 0, :, :t].double()
            low[n], high[n], mean[n] = k_HtD.amin(1), k_HtD.amax(1), k_HtD.mean(1)
            box_H1D = (high[n] - low[n])[:, None]
            interval = ((k_HtD - low[n, :, None]) * 2**bits / box_H1D).nan_to_num(0).floor()
            codes[n, :, :t, :head_dim] = interval.clamp(max=2**bits - 1).byte()
            centre = low[n, :, None] + (codes[n, :, :t, :head_dim] + 0.5) * box_H1D / 2**bits
            residual[n, :, :t] = (k_HtD - centre).norm(dim=-1)
    planes = [codes >> w & 1 for w in reversed(range(bits))]
    planes_NHWTP8 = torch.unflatten(torch.stack([*planes, codes], 2)[:, :, :bits], -1, (-1, 8))
    return Digests(
        mean_NHD=mean,
        low_NHD=low,
        high_NHD=high,
        codes_NHWTP=(planes_NHWTP8 << torch.arange(8, dtype=torch.uint8)).sum(-1).byte(),
        residual_NHT=residual,
        num_tokens_N=used_N.int(),
    )
