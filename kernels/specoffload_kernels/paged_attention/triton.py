"""Paged attention on a GPU: what is launched for a call, and with which tiles.

B rows, Hq query heads, H kv heads, G = Hq // H, Q query tokens, D head_dim, S slots, N blocks,
T tokens per block, P splits.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch
import triton
import triton.language as tl

from specoffload_kernels.paged_attention import gathered
from specoffload_kernels.paged_attention.tiling import (
    COMBINED_SPLITS,
    LISTED_BLOCKS,
    MAX_HEAD_DIM,
    MAX_SPLITS,
    Tiling,
    Vendor,
    num_splits,
    tiling,
)
from specoffload_kernels.paged_attention.triton_kernels import (
    combine_kernel,
    present_kernel,
    split_kernel,
)
from specoffload_kernels.part import AttentionPart

_LOGGER = logging.getLogger(__name__)
_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
PRESENT_CONSTANTS = {"LISTED": LISTED_BLOCKS}
SMALL_OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
_LOG2E = 1.0 / math.log(2.0)


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
    """Attend to the blocks that have a slot; see ``specoffload_kernels.paged_attention``.

    Waits for nothing on the device. ``q_start_B`` and ``kv_len_B`` may lie on the CPU; if pinned,
    they must keep their values until the call has run. A slot that the arena lacks cannot raise
    here: it stops the device with an assertion. What the kernels do not serve goes to torch.
    """
    num_rows, num_q_heads, num_q, head_dim = q_BHQD.shape
    num_slots, _, num_heads, block_size, _ = arena_S2HTD.shape
    num_blocks = table_BN.shape[1]
    unserved = _unserved(q_BHQD, arena_S2HTD)
    if unserved:
        _warn(unserved)
        return gathered.attend(
            q_BHQD,
            arena_S2HTD,
            table_BN,
            q_start_B,
            kv_len_B,
            scale=scale,
            window=window,
            softcap=softcap,
            with_block_lse=with_block_lse,
        )
    if q_BHQD.stride(3) != 1:
        q_BHQD = q_BHQD.contiguous()
    device = arena_S2HTD.device
    q_start_B = q_start_B.to(device, non_blocking=True).contiguous()
    kv_len_B = kv_len_B.to(device, non_blocking=True).contiguous()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    vendor: Vendor = "hip" if torch.version.hip else "cuda"
    groups = num_q_heads // num_heads
    element_bytes = max(q_BHQD.element_size(), arena_S2HTD.element_size())
    tile = tiling(vendor, element_bytes, head_dim, num_q * groups)
    constants = split_constants(
        q_BHQD.dtype,
        arena_S2HTD.dtype,
        head_dim,
        block_size,
        groups,
        tile,
        window=window is not None,
        softcap=softcap is not None,
        block_lse=with_block_lse,
    )
    row_tiles = triton.cdiv(num_q * groups, tile.rows)
    steps = triton.cdiv(num_blocks * constants["BLOCK_PAD"], tile.tokens)
    splits = num_splits(steps, row_tiles * num_heads * num_rows, _num_processors(device))

    out_PBQHD = empty(splits, num_rows, num_q, num_q_heads, head_dim)
    lse_PBHQ = empty(splits, num_rows, num_q_heads, num_q)
    block_lse_BHQN = None
    if with_block_lse:
        block_lse_BHQN = empty(num_rows, num_q_heads, num_q, num_blocks).fill_(-torch.inf)
    if not lse_PBHQ.numel():
        return AttentionPart(
            out_BQHD=out_PBQHD[0], lse_BHQ=lse_PBHQ[0], block_lse_BHQN=block_lse_BHQN
        )
    with torch.cuda.device_of(arena_S2HTD):
        slots_BN, blocks_BN = empty(2, num_rows, num_blocks, dtype=torch.int32)
        before_BN = empty(num_rows, num_blocks + 1, dtype=torch.int32)
        present_kernel[(num_rows,)](
            table_BN,
            slots_BN,
            blocks_BN,
            before_BN,
            *table_BN.stride(),
            num_blocks,
            num_slots,
            **PRESENT_CONSTANTS,
            **SMALL_OPTIONS,
        )
        split_kernel[(splits * row_tiles, num_heads, num_rows)](
            q_BHQD,
            arena_S2HTD,
            slots_BN,
            blocks_BN,
            before_BN,
            q_start_B,
            kv_len_B,
            out_PBQHD,
            lse_PBHQ,
            lse_PBHQ if block_lse_BHQN is None else block_lse_BHQN,
            *q_BHQD.stride()[:3],
            *arena_S2HTD.stride()[:3],
            num_q,
            num_blocks,
            splits,
            window or 0,
            scale * _LOG2E if softcap is None else scale / softcap,
            0.0 if softcap is None else softcap * _LOG2E,
            **constants,
            **tile.options,
        )
        out_BQHD, lse_BHQ = out_PBQHD[0], lse_PBHQ[0]
        if splits > 1:
            out_BQHD, lse_BHQ = torch.empty_like(out_BQHD), torch.empty_like(lse_BHQ)
            combine_kernel[(lse_BHQ.numel(),)](
                out_PBQHD,
                lse_PBHQ,
                out_BQHD,
                lse_BHQ,
                splits,
                num_rows,
                num_q,
                num_q_heads,
                **combine_constants(head_dim),
                **SMALL_OPTIONS,
            )
    return AttentionPart(out_BQHD=out_BQHD, lse_BHQ=lse_BHQ, block_lse_BHQN=block_lse_BHQN)


def split_constants(
    q_dtype: torch.dtype,
    arena_dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    groups: int,
    tile: Tiling,
    *,
    window: bool,
    softcap: bool,
    block_lse: bool,
) -> dict[str, Any]:
    """Return what ``split_kernel`` is compiled for."""
    # The interpreter gets products of bfloat16 silently wrong.
    as_they_are = q_dtype == arena_dtype and not triton.knobs.runtime.interpret
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PAD": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": block_size,
        "BLOCK_PAD": triton.next_power_of_2(block_size),
        "GROUPS": groups,
        "ROWS": tile.rows,
        "TOKENS": tile.tokens,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "BLOCK_LSE": block_lse,
        "DOT_DTYPE": _DTYPES[arena_dtype] if as_they_are else tl.float32,
    }


def combine_constants(head_dim: int) -> dict[str, Any]:
    """Return what ``combine_kernel`` is compiled for."""
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PAD": triton.next_power_of_2(head_dim),
        "SPLITS": MAX_SPLITS,
        "COMBINED": COMBINED_SPLITS,
    }


def _unserved(q_BHQD: torch.Tensor, arena_S2HTD: torch.Tensor) -> str:
    """Say what about a call the kernels do not serve; nothing if they do."""
    head_dim = arena_S2HTD.shape[4]
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is above {MAX_HEAD_DIM}"
    for tensor in (q_BHQD, arena_S2HTD):
        if tensor.dtype not in _DTYPES:
            return f"{tensor.dtype} is none of {', '.join(map(str, _DTYPES))}"
    if arena_S2HTD.stride()[3:] != (head_dim, 1):
        return "the tokens of a block are not contiguous in the arena"
    return ""


@functools.cache
def _warn(unserved: str) -> None:
    _LOGGER.warning("paged attention on the GPU uses the slower torch path: %s", unserved)


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type == "cpu":  # under the interpreter
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
