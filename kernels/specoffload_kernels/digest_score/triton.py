"""Scores by digests on a GPU: launches ``shadow_kernel`` or ``corner_kernel``."""

from __future__ import annotations

import math

import torch
import triton

from specoffload_kernels.digest_score.triton_kernels import corner_kernel, shadow_kernel
from specoffload_kernels.digests import DigestRule, Digests, DigestScore

ROWS = 16
"""Packed rows of a program."""
DIMS = 32
"""Most channels of one step of a product: float32 products run outside the tensor cores, and those
of whole heads would not fit the registers."""
TOKENS = 32
"""Most tokens of one step of ``shadow_kernel``."""
SHADOW_BLOCKS = 4
"""Blocks of a program of ``shadow_kernel``."""
CORNER_BLOCKS = 32
"""Blocks of a program of ``corner_kernel``."""
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}


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
    num_rows, num_q_heads, num_q, head_dim = q_BHQD.shape
    num_digests, num_heads, bits, block_size = digests.codes_NHWTP.shape[:4]
    num_blocks = table_BN.shape[1]
    if q_BHQD.stride(3) != 1:
        q_BHQD = q_BHQD.contiguous()
    shadow = rule is DigestRule.SHADOW
    estimate_BHQN = q_BHQD.new_empty((*q_BHQD.shape[:3], num_blocks), dtype=torch.float32)
    upper_BHQN = torch.empty_like(estimate_BHQN) if shadow else None
    mean_NHD, low_NHD, high_NHD, codes_NHWTP, residual_NHT, num_tokens_N = (
        tensor.contiguous() for tensor in digests.tensors
    )
    corners = (mean_NHD, mean_NHD) if rule is DigestRule.MEAN else (low_NHD, high_NHD)
    groups = num_q_heads // num_heads
    tiles = triton.cdiv(num_q * groups, ROWS)
    per_program = SHADOW_BLOCKS if shadow else CORNER_BLOCKS
    common = (
        num_tokens_N,
        table_BN,
        q_start_B.contiguous(),
        kv_len_B.contiguous(),
        estimate_BHQN,
    )
    numbers = (
        *q_BHQD.stride()[:3],
        *table_BN.stride(),
        num_q,
        num_blocks,
        num_digests,
        window or 0,
        scale / softcap if softcap else scale * math.log2(math.e),
        (softcap or 0.0) * math.log2(math.e),
    )
    if estimate_BHQN.numel():
        grid = (tiles * triton.cdiv(num_blocks, per_program), num_heads, num_rows)
        constants = score_constants(
            head_dim, block_size, groups, window=window is not None, softcap=softcap is not None
        )
        with torch.cuda.device_of(q_BHQD):
            if upper_BHQN is not None:
                shadow_kernel[grid](
                    *(q_BHQD, low_NHD, high_NHD, codes_NHWTP, residual_NHT, *common, upper_BHQN),
                    *numbers,
                    **constants,
                    **shadow_constants(block_size, bits),
                    **OPTIONS,
                )
            else:
                corner_kernel[grid](
                    *(q_BHQD, *corners, *common),
                    *numbers,
                    **constants,
                    BLOCKS=CORNER_BLOCKS,
                    BOX=rule is DigestRule.BOX,
                    **OPTIONS,
                )
    if rule is DigestRule.BOX:
        upper_BHQN = estimate_BHQN
    return DigestScore(estimate_BHQN=estimate_BHQN, upper_BHQN=upper_BHQN)


def score_constants(
    head_dim: int, block_size: int, groups: int, *, window: bool, softcap: bool
) -> dict[str, object]:
    """Return what both kernels are compiled for."""
    return {
        "HEAD_DIM": head_dim,
        "DIMS": max(16, min(triton.next_power_of_2(head_dim), DIMS)),
        "BLOCK_SIZE": block_size,
        "GROUPS": groups,
        "ROWS": ROWS,
        "WINDOW": window,
        "SOFTCAP": softcap,
    }


def shadow_constants(block_size: int, bits: int) -> dict[str, object]:
    """Return what ``shadow_kernel`` is compiled for besides."""
    return {
        "BITS": bits,
        "TOKENS": max(16, min(triton.next_power_of_2(block_size), TOKENS)),
        "BLOCKS": SHADOW_BLOCKS,
    }
