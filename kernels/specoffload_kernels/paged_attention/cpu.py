"""Paged attention on the CPU: which of the paths serves a call."""

from __future__ import annotations

import functools

import torch

from specoffload_kernels.paged_attention import gathered
from specoffload_kernels.part import AttentionPart
from specoffload_kernels.selection import selected

# Packed rows (query tokens x group) above which torch's flash kernel beats the gathered logits, and
# the native kernel. Both are close to it for a while beyond, and give per-block sums besides.
_FLASH_ROWS_TORCH = 64
_FLASH_ROWS_NATIVE = 1024


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
    """Attend to the blocks that have a slot; see ``specoffload_kernels.paged_attention``."""
    selection = selected()
    library = selection.library
    if library is not None and not library.supports(q_BHQD, arena_S2HTD):
        library = None
    packed_rows = q_BHQD.shape[2] * (q_BHQD.shape[1] // arena_S2HTD.shape[2])
    if (
        packed_rows > (_FLASH_ROWS_TORCH if library is None else _FLASH_ROWS_NATIVE)
        and softcap is None
        and not with_block_lse
        and q_BHQD.dtype == arena_S2HTD.dtype
    ):
        return gathered.prefill(
            q_BHQD, arena_S2HTD, table_BN, q_start_B, kv_len_B, scale=scale, window=window
        )
    attend = gathered.attend
    if library is not None:
        assert selection.isa is not None
        attend = functools.partial(library.paged_attention, isa=selection.isa)
    return attend(
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
