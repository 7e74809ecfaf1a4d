"""Append on a GPU: one program for each new token and kv head.

B rows, H kv heads, Q new tokens, D head_dim, S slots, T tokens per block.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

OPTIONS = {"num_warps": 1, "num_stages": 2, "enable_fp_fusion": True}


def append(
    arena_S2HTD: torch.Tensor,
    k_BHQD: torch.Tensor,
    v_BHQD: torch.Tensor,
    slots_BQ: torch.Tensor,
    offsets_BQ: torch.Tensor,
) -> None:
    """Write new tokens to their slots; see ``specoffload_kernels.append``.

    A place outside the arena is not refused before the launch: the kernel asserts.
    """
    num_rows, num_heads, num_q, head_dim = k_BHQD.shape
    if k_BHQD.numel():
        with torch.cuda.device_of(arena_S2HTD):
            append_kernel[(num_rows * num_q, num_heads)](
                arena_S2HTD,
                k_BHQD,
                v_BHQD,
                slots_BQ.contiguous(),
                offsets_BQ.contiguous(),
                *arena_S2HTD.stride(),
                *k_BHQD.stride(),
                *v_BHQD.stride(),
                arena_S2HTD.shape[0],
                num_q,
                **append_constants(head_dim, arena_S2HTD.shape[3]),
                **OPTIONS,
            )


def append_constants(head_dim: int, block_size: int) -> dict[str, object]:
    """Return what ``append_kernel`` is compiled for."""
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PAD": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
    }


@triton.jit(do_not_specialize=["num_slots", "num_q"], debug=True)
def append_kernel(
    arena: tl.tensor,  # [S, 2, H, T, D] with strides
    k: tl.tensor,  # [B, H, Q, D] with strides, as the next
    v: tl.tensor,
    slots: tl.tensor,  # integers [B, Q], as the next
    offsets: tl.tensor,
    arena_stride_slot: tl.tensor,
    arena_stride_kv: tl.tensor,
    arena_stride_head: tl.tensor,
    arena_stride_token: tl.tensor,
    arena_stride_channel: tl.tensor,
    k_stride_row: tl.tensor,
    k_stride_head: tl.tensor,
    k_stride_token: tl.tensor,
    k_stride_channel: tl.tensor,
    v_stride_row: tl.tensor,
    v_stride_head: tl.tensor,
    v_stride_token: tl.tensor,
    v_stride_channel: tl.tensor,
    num_slots: tl.tensor,
    num_q: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Write one head's key and value of one token."""
    i = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    row, query = i // num_q, i % num_q
    slot = tl.load(slots + i).to(tl.int64)
    offset = tl.load(offsets + i).to(tl.int64)
    inside = (slot < num_slots) & (offset >= 0) & (offset < BLOCK_SIZE)
    tl.device_assert((slot < 0) | inside, "a place outside the arena")
    d_D = tl.arange(0, HEAD_DIM_PAD)
    used_D = d_D < tl.where(slot >= 0, HEAD_DIM, 0)
    k += row * k_stride_row + h * k_stride_head + query * k_stride_token
    v += row * v_stride_row + h * v_stride_head + query * v_stride_token
    arena += slot * arena_stride_slot + h * arena_stride_head + offset * arena_stride_token
    k_D = tl.load(k + d_D * k_stride_channel, mask=used_D)
    v_D = tl.load(v + d_D * v_stride_channel, mask=used_D)
    to_D = arena + d_D * arena_stride_channel
    tl.store(to_D, k_D.to(arena.dtype.element_ty), mask=used_D)
    tl.store(to_D + arena_stride_kv, v_D.to(arena.dtype.element_ty), mask=used_D)
