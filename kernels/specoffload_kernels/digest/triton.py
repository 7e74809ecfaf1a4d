"""Digests on a GPU: one program for each slot and kv head, which reads the keys twice.

N slots, H kv heads, D head_dim, T tokens per block, W bit planes, P bytes of a plane.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specoffload_kernels.digests import Digests

OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
_TILE = 4096
"""Keys' channels that a program holds at a time."""


def digest(
    arena_S2HTD: torch.Tensor, slots_N: torch.Tensor, num_tokens_N: torch.Tensor, *, bits: int
) -> Digests:
    """Summarise the keys of slots; see ``specoffload_kernels.digest``."""
    num_slots, _, num_heads, block_size, head_dim = arena_S2HTD.shape
    num = slots_N.shape[0]
    mean_NHD, low_NHD, high_NHD = (
        arena_S2HTD.new_empty((num, num_heads, head_dim)) for _ in range(3)
    )
    codes_NHWTP = arena_S2HTD.new_empty(
        (num, num_heads, bits, block_size, -(-head_dim // 8)), dtype=torch.uint8
    )
    residual_NHT = arena_S2HTD.new_empty((num, num_heads, block_size), dtype=torch.float16)
    used_N = arena_S2HTD.new_empty((num,), dtype=torch.int32)
    if num:
        with torch.cuda.device_of(arena_S2HTD):
            digest_kernel[(num, num_heads)](
                arena_S2HTD,
                slots_N.contiguous(),
                num_tokens_N.contiguous(),
                mean_NHD,
                low_NHD,
                high_NHD,
                codes_NHWTP,
                residual_NHT,
                used_N,
                *arena_S2HTD.stride()[:1],
                *arena_S2HTD.stride()[2:],
                num_slots,
                **digest_constants(head_dim, block_size, bits),
                **OPTIONS,
            )
    return Digests(
        mean_NHD=mean_NHD,
        low_NHD=low_NHD,
        high_NHD=high_NHD,
        codes_NHWTP=codes_NHWTP,
        residual_NHT=residual_NHT,
        num_tokens_N=used_N,
    )


def digest_constants(head_dim: int, block_size: int, bits: int) -> dict[str, object]:
    """Return what ``digest_kernel`` is compiled for."""
    head_dim_pad = max(8, triton.next_power_of_2(head_dim))
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PAD": head_dim_pad,
        "BLOCK_SIZE": block_size,
        "BITS": bits,
        "TOKENS": max(1, min(triton.next_power_of_2(block_size), _TILE // head_dim_pad)),
    }


@triton.jit(do_not_specialize=["num_slots"], debug=True)
def digest_kernel(
    arena: tl.tensor,  # [S, 2, H, T, D] with strides
    slots: tl.tensor,  # integers [N]
    num_tokens: tl.tensor,  # integers [N]
    mean: tl.tensor,  # [N, H, D], as the next two
    low: tl.tensor,
    high: tl.tensor,
    codes: tl.tensor,  # uint8 [N, H, W, T, P]
    residual: tl.tensor,  # float16 [N, H, T]
    used: tl.tensor,  # int32 [N]
    stride_slot: tl.tensor,
    stride_head: tl.tensor,
    stride_token: tl.tensor,
    stride_channel: tl.tensor,
    num_slots: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens of one step
) -> None:
    """Digest one kv head of one slot."""
    NUM_BYTES: tl.constexpr = (HEAD_DIM + 7) // 8
    INTERVALS: tl.constexpr = 2**BITS
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    entry = n * tl.num_programs(1) + h
    slot = tl.load(slots + n).to(tl.int64)
    tl.device_assert(slot < num_slots, "a slot that the arena lacks")
    end = tl.maximum(tl.minimum(tl.load(num_tokens + n).to(tl.int32), BLOCK_SIZE), 0)
    end = tl.where(slot >= 0, end, 0)
    tl.store(used + n, end)
    keys = arena + tl.maximum(slot, 0) * stride_slot + h.to(tl.int64) * stride_head

    d_D = tl.arange(0, HEAD_DIM_PAD)
    t_T = tl.arange(0, TOKENS)
    low_D = tl.full((HEAD_DIM_PAD,), float("inf"), tl.float32)
    high_D = tl.full((HEAD_DIM_PAD,), float("-inf"), tl.float32)
    sum_D = tl.zeros((HEAD_DIM_PAD,), tl.float32)
    for start in range(0, end, TOKENS):
        token_T = start + t_T
        read_TD = (token_T < end)[:, None] & (d_D < HEAD_DIM)[None, :]
        k_TD = tl.load(
            keys + token_T[:, None] * stride_token + d_D[None, :] * stride_channel,
            mask=read_TD,
            other=0.0,
        ).to(tl.float32)
        low_D = tl.minimum(low_D, tl.min(tl.where(read_TD, k_TD, float("inf")), 0))
        high_D = tl.maximum(high_D, tl.max(tl.where(read_TD, k_TD, float("-inf")), 0))
        sum_D += tl.sum(k_TD, 0)
    known_D = d_D < tl.where(end > 0, HEAD_DIM, 0)
    low_D = tl.where(known_D, low_D, 0.0)
    high_D = tl.where(known_D, high_D, 0.0)
    at_D = entry * HEAD_DIM + d_D
    tl.store(mean + at_D, sum_D / tl.maximum(end, 1).to(tl.float32), mask=d_D < HEAD_DIM)
    tl.store(low + at_D, low_D, mask=d_D < HEAD_DIM)
    tl.store(high + at_D, high_D, mask=d_D < HEAD_DIM)

    # Where all keys agree, they are in interval 0. The quotient is rounded as on the CPU.
    box_D = high_D - low_D
    divisor_TD = tl.where(box_D > 0.0, box_D, 1.0)[None, :] + tl.zeros((TOKENS, 1), tl.float32)
    p_P = tl.arange(0, HEAD_DIM_PAD // 8)
    bit_8 = tl.arange(0, 8)
    for start in range(0, BLOCK_SIZE, TOKENS):
        token_T = start + t_T
        read_TD = (token_T < end)[:, None] & (d_D < HEAD_DIM)[None, :]
        k_TD = tl.load(
            keys + token_T[:, None] * stride_token + d_D[None, :] * stride_channel,
            mask=read_TD,
            other=0.0,
        ).to(tl.float32)
        interval_TD = tl.math.div_rn((k_TD - low_D[None, :]) * INTERVALS, divisor_TD)
        interval_TD = tl.where(read_TD, tl.minimum(tl.floor(interval_TD), INTERVALS - 1.0), 0.0)
        centre_TD = low_D[None, :] + (interval_TD + 0.5) * (box_D / INTERVALS)[None, :]
        gap_TD = tl.where(read_TD, k_TD - centre_TD, 0.0)
        gap_T = tl.sqrt(tl.sum(gap_TD * gap_TD, 1))
        half_T = gap_T.to(tl.float16)
        next_T = (half_T.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
        half_T = tl.where(half_T.to(tl.float32) < gap_T, next_T, half_T)
        tl.store(residual + entry * BLOCK_SIZE + token_T, half_T, mask=token_T < BLOCK_SIZE)
        code_TP8 = tl.reshape(interval_TD.to(tl.int32), (TOKENS, HEAD_DIM_PAD // 8, 8))
        for w in tl.static_range(BITS):
            plane_TP = tl.sum(((code_TP8 >> (BITS - 1 - w)) & 1) << bit_8[None, None, :], 2)
            tl.store(
                codes
                + ((entry * BITS + w) * BLOCK_SIZE + token_T[:, None]) * NUM_BYTES
                + p_P[None, :],
                plane_TP.to(tl.uint8),
                mask=(token_T < BLOCK_SIZE)[:, None] & (p_P < NUM_BYTES)[None, :],
            )
