"""Digests in torch, on any device."""

from __future__ import annotations

import torch

from specoffload_kernels.digests import Digests


def digest(
    arena_S2HTD: torch.Tensor, slots_N: torch.Tensor, num_tokens_N: torch.Tensor, *, bits: int
) -> Digests:
    """Summarise the keys of slots; see ``specoffload_kernels.digest``."""
    dtype, block_size = arena_S2HTD.dtype, arena_S2HTD.shape[3]
    num_tokens_N = num_tokens_N.masked_fill(slots_N < 0, 0).clamp(0, block_size).int()
    used_NT = torch.arange(block_size, device=slots_N.device) < num_tokens_N[:, None]
    unused_N1T1 = ~used_NT[:, None, :, None]
    k_NHTD = arena_S2HTD[slots_N.clamp(min=0).long(), 0].float()
    low_NH1D = k_NHTD.masked_fill(unused_N1T1, torch.inf).amin(2, keepdim=True)
    high_NH1D = k_NHTD.masked_fill(unused_N1T1, -torch.inf).amax(2, keepdim=True)
    empty_N111 = (num_tokens_N == 0)[:, None, None, None]
    low_NH1D.masked_fill_(empty_N111, 0.0)
    high_NH1D.masked_fill_(empty_N111, 0.0)
    box_NH1D = high_NH1D - low_NH1D

    tiny = torch.finfo(torch.float32).tiny  # where all keys agree, they are in interval 0
    interval_NHTD = (k_NHTD - low_NH1D) * 2**bits / box_NH1D.clamp(min=tiny)
    interval_NHTD = interval_NHTD.masked_fill_(unused_N1T1, 0.0).floor_().clamp_(max=2**bits - 1)
    centre_NHTD = low_NH1D + (interval_NHTD + 0.5) * (box_NH1D / 2**bits)
    residual_NHT = (k_NHTD - centre_NHTD).norm(dim=-1).masked_fill_(~used_NT[:, None], 0.0)
    mean_NHD = (
        k_NHTD.masked_fill(unused_N1T1, 0.0).sum(2) / num_tokens_N.clamp(min=1)[:, None, None]
    )
    return Digests(
        mean_NHD=mean_NHD.to(dtype),
        low_NHD=low_NH1D.squeeze(2).to(dtype),
        high_NHD=high_NH1D.squeeze(2).to(dtype),
        codes_NHWTP=_planes(interval_NHTD.byte(), bits),
        residual_NHT=_half_rounded_up(residual_NHT),
        num_tokens_N=num_tokens_N,
    )


def _planes(codes_NHTD: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack one bit of eight channels into a byte, the most significant bits first."""
    device = codes_NHTD.device
    padding = -codes_NHTD.shape[3] % 8
    codes_NHTD = torch.nn.functional.pad(codes_NHTD, (0, padding))
    codes_NHTP8 = torch.unflatten(codes_NHTD, 3, (-1, 8))
    plane_W = torch.arange(bits - 1, -1, -1, dtype=torch.uint8, device=device)
    bit_8 = torch.arange(8, dtype=torch.uint8, device=device)
    bits_NHWTP8 = (codes_NHTP8[:, :, None] >> plane_W[:, None, None, None]) & 1
    return (bits_NHWTP8 << bit_8).sum(-1, dtype=torch.uint8)


def _half_rounded_up(x: torch.Tensor) -> torch.Tensor:
    """Round to the next float16 that is not below; x is not negative."""
    half = x.half()
    next_half = (half.view(torch.int16) + 1).view(torch.float16)
    return torch.where(half.float() < x, next_half, half)
