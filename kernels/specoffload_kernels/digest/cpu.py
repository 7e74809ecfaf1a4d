"""Digests in torch, on any device: a bounded number of slots at a time.

N slots, n of them in a step, H kv heads, D head_dim, T tokens per block, W bit planes of P bytes.
"""

from __future__ import annotations

import torch

from specoffload_kernels.digests import Digests

_STEP_BYTES = 4 << 20  # bound on the keys of one step: what a cache holds
_LOW_BITS = 0x0101010101010101  # of eight bytes
_GATHER = 0x0102040810204080  # times eight low bits: one byte, at the top


def digest(
    arena_S2HTD: torch.Tensor, slots_N: torch.Tensor, num_tokens_N: torch.Tensor, *, bits: int
) -> Digests:
    """Summarise the keys of slots; see ``specoffload_kernels.digest``."""
    num_heads, block_size, head_dim = arena_S2HTD.shape[2:]
    num_tokens_N = num_tokens_N.masked_fill(slots_N < 0, 0).clamp(0, block_size).int()
    slots_N = slots_N.clamp(min=0).long()
    step = max(1, _STEP_BYTES // (4 * num_heads * block_size * head_dim))
    steps = [
        _step(arena_S2HTD, slots_N[i : i + step], num_tokens_N[i : i + step], bits)
        for i in range(0, max(1, slots_N.shape[0]), step)
    ]
    return Digests.of([*(torch.cat(parts) for parts in zip(*steps, strict=True)), num_tokens_N])


def _step(
    arena_S2HTD: torch.Tensor, slots_n: torch.Tensor, num_tokens_n: torch.Tensor, bits: int
) -> tuple[torch.Tensor, ...]:
    """Return the fields of some digests but the last."""
    dtype, block_size = arena_S2HTD.dtype, arena_S2HTD.shape[3]
    unused_nT = torch.arange(block_size, device=slots_n.device) >= num_tokens_n[:, None]
    unused_n1T1 = unused_nT[:, None, :, None]
    k_nHTD = arena_S2HTD[slots_n, 0].float()
    low_nHD = k_nHTD.masked_fill_(unused_n1T1, torch.inf).amin(2)
    high_nHD = k_nHTD.masked_fill_(unused_n1T1, -torch.inf).amax(2)
    for corner_nHD in (low_nHD, high_nHD):
        corner_nHD.masked_fill_((num_tokens_n == 0)[:, None, None], 0.0)
    k_nHTD.masked_fill_(unused_n1T1, 0.0)
    mean_nHD = k_nHTD.sum(2).div_(num_tokens_n.clamp(min=1)[:, None, None])

    k_nHTD.sub_(low_nHD[:, :, None])
    box_nH1D = (high_nHD - low_nHD)[:, :, None]
    # Where all keys agree, they are in interval 0.
    divisor_nH1D = box_nH1D.clamp(min=torch.finfo(torch.float32).tiny)
    interval_nHTD = (k_nHTD * 2**bits).div_(divisor_nH1D).masked_fill_(unused_n1T1, 0.0)
    interval_nHTD.floor_().clamp_(max=2**bits - 1)
    codes_nHTD = interval_nHTD.byte()
    gap_nHTD = interval_nHTD.add_(0.5).mul_(box_nH1D / 2**bits).sub_(k_nHTD)
    residual_nHT = gap_nHTD.norm(dim=-1).masked_fill_(unused_nT[:, None], 0.0)
    return (
        mean_nHD.to(dtype),
        low_nHD.to(dtype),
        high_nHD.to(dtype),
        _planes(codes_nHTD, bits),
        _half_rounded_up(residual_nHT),
    )


def _planes(codes_nHTD: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack one bit of eight channels into a byte, the most significant bits first."""
    codes_nHTD = torch.nn.functional.pad(codes_nHTD, (0, -codes_nHTD.shape[3] % 8))
    codes_nHTP = codes_nHTD.contiguous().view(torch.int64)
    plane_W = torch.arange(bits - 1, -1, -1, device=codes_nHTP.device)
    bits_nHWTP = (codes_nHTP[:, :, None] >> plane_W[:, None, None]) & _LOW_BITS
    return bits_nHWTP.mul_(_GATHER).bitwise_right_shift_(56).bitwise_and_(255).byte()


def _half_rounded_up(x: torch.Tensor) -> torch.Tensor:
    """Round to the next float16 that is not below; x is not negative."""
    half = x.half()
    next_half = (half.view(torch.int16) + 1).view(torch.float16)
    return torch.where(half.float() < x, next_half, half)
