"""Merge on a GPU: one program for each query of each head, over up to eight parts at a time.

B rows, Hq query heads, Q query tokens, D head_dim, N blocks.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specoffload_kernels.part import AttentionPart

MAX_PARTS = 8
"""Parts of one launch; each number of parts is compiled on its own."""
MERGED_BLOCKS = 256
"""Block sums of one step."""
OPTIONS = {"num_warps": 1, "num_stages": 2, "enable_fp_fusion": True}


def merge(parts: Sequence[AttentionPart], *, sinks_H: torch.Tensor | None = None) -> AttentionPart:
    """Combine parts; see ``specoffload_kernels.merge``."""
    if any(part.block_lse_BHQN is None for part in parts):
        parts = [
            AttentionPart(out_BQHD=part.out_BQHD, lse_BHQ=part.lse_BHQ, block_lse_BHQN=None)
            for part in parts
        ]
    while len(parts) > MAX_PARTS:
        parts = [_launch(parts[:MAX_PARTS], None), *parts[MAX_PARTS:]]
    return _launch(parts, sinks_H)


def _launch(parts: Sequence[AttentionPart], sinks_H: torch.Tensor | None) -> AttentionPart:
    outs = tuple(part.out_BQHD.contiguous() for part in parts)
    lses = tuple(part.lse_BHQ.contiguous() for part in parts)
    sums = tuple(part.block_lse_BHQN for part in parts if part.block_lse_BHQN is not None)
    sums = tuple(block_lse_BHQN.contiguous() for block_lse_BHQN in sums)
    if sinks_H is not None:
        sinks_H = sinks_H.float().contiguous()
    _, num_q, num_heads, head_dim = outs[0].shape
    out_BQHD, lse_BHQ = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    block_lse_BHQN = torch.empty_like(sums[0]) if sums else None
    if lse_BHQ.numel():
        with torch.cuda.device_of(out_BQHD):
            merge_kernel[(lse_BHQ.numel(),)](
                outs,
                lses,
                sums or lses,
                lse_BHQ if sinks_H is None else sinks_H,
                out_BQHD,
                lse_BHQ,
                lse_BHQ if block_lse_BHQN is None else block_lse_BHQN,
                num_q,
                num_heads,
                sums[0].shape[-1] if sums else 0,
                **merge_constants(
                    len(parts), head_dim, sinks=sinks_H is not None, block_lse=bool(sums)
                ),
                **OPTIONS,
            )
    return AttentionPart(out_BQHD=out_BQHD, lse_BHQ=lse_BHQ, block_lse_BHQN=block_lse_BHQN)


def merge_constants(
    num_parts: int, head_dim: int, *, sinks: bool, block_lse: bool
) -> dict[str, object]:
    """Return what ``merge_kernel`` is compiled for."""
    return {
        "PARTS": num_parts,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PAD": triton.next_power_of_2(head_dim),
        "SINKS": sinks,
        "BLOCK_LSE": block_lse,
        "BLOCKS": MERGED_BLOCKS,
    }


@triton.jit(do_not_specialize=["num_q", "num_heads", "num_blocks"])
def merge_kernel(
    outs: tl.tuple,  # of float32 [B, Q, Hq, D]
    lses: tl.tuple,  # of float32 [B, Hq, Q]
    sums: tl.tuple,  # of float32 [B, Hq, Q, N], unless not BLOCK_LSE
    sinks: tl.tensor,  # float32 [Hq], unless not SINKS
    out: tl.tensor,
    lse: tl.tensor,
    block_lse: tl.tensor,
    num_q: tl.tensor,
    num_heads: tl.tensor,
    num_blocks: tl.tensor,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_LSE: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Merge the parts of one query."""
    i = tl.program_id(0).to(tl.int64)
    head = i % num_heads
    j = (i // (num_q * num_heads) * num_heads + head) * num_q + i // num_heads % num_q
    largest = tl.load(lses[0] + j)
    for p in tl.static_range(1, PARTS):
        largest = tl.maximum(largest, tl.load(lses[p] + j))
    if SINKS:
        sink = tl.load(sinks + head)
        largest = tl.maximum(largest, sink)
    largest = tl.where(largest == float("-inf"), 0.0, largest)

    d_D = tl.arange(0, HEAD_DIM_PAD)
    acc_D = tl.zeros((HEAD_DIM_PAD,), tl.float32)
    total = 0.0
    for p in tl.static_range(PARTS):
        weight = tl.exp(tl.load(lses[p] + j) - largest)
        total += weight
        out_D = tl.load(outs[p] + i * HEAD_DIM + d_D, mask=d_D < HEAD_DIM, other=0.0)
        acc_D += weight * out_D
    tl.store(lse + j, largest + tl.log(total))
    if SINKS:
        total += tl.exp(sink - largest)
    tl.store(
        out + i * HEAD_DIM + d_D, acc_D / tl.where(total > 0.0, total, 1.0), mask=d_D < HEAD_DIM
    )
    if BLOCK_LSE:
        # A block is in at most one part, so that its sum is the largest.
        for start in range(0, num_blocks, BLOCKS):
            n_N = start + tl.arange(0, BLOCKS)
            sum_N = tl.load(sums[0] + j * num_blocks + n_N, mask=n_N < num_blocks)
            for p in tl.static_range(1, PARTS):
                other_N = tl.load(sums[p] + j * num_blocks + n_N, mask=n_N < num_blocks)
                sum_N = tl.maximum(sum_N, other_N)
            tl.store(block_lse + j * num_blocks + n_N, sum_N, mask=n_N < num_blocks)
