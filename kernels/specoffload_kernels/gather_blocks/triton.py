"""Gathering of blocks on a GPU, and the kernel that copies either way."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specoffload_kernels.gather_blocks.integers import as_integers

STRETCH_BYTES = 16384
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}


def gather_blocks(arena: torch.Tensor, slots_n: torch.Tensor, run: torch.Tensor) -> None:
    """Copy slots to places of the run; see ``specoffload_kernels.gather_blocks.cpu``.

    A slot that the arena lacks cannot raise here: it stops the device with an assertion.
    """
    copy_blocks(arena, slots_n, run, gather=True)


def copy_blocks(
    arena: torch.Tensor, slots_n: torch.Tensor, run: torch.Tensor, *, gather: bool
) -> None:
    """Copy slots to places of the run, or places to slots."""
    arena_SW, run_nW = as_integers(arena, slots_n, run)
    if not run_nW.numel():
        return
    constants = copy_constants(run_nW.element_size(), gather=gather)
    with torch.cuda.device_of(arena):
        copy_kernel[(run_nW.shape[0], triton.cdiv(run_nW.shape[1], constants["WORDS"]))](
            arena_SW,
            slots_n.contiguous(),
            run_nW,
            arena_SW.shape[0],
            run_nW.shape[1],
            arena_SW.stride(0),
            run_nW.stride(0),
            **constants,
            **OPTIONS,
        )


def copy_constants(word_bytes: int, *, gather: bool) -> dict[str, int]:
    """Return what ``copy_kernel`` is compiled for."""
    return {"GATHER": gather, "WORDS": STRETCH_BYTES // word_bytes}


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots"], debug=True)
def copy_kernel(
    arena: tl.tensor,  # integers [S, W]
    slots: tl.tensor,  # int32 or int64 [n]
    run: tl.tensor,  # integers [n, W]
    num_slots: tl.tensor,
    num_words: tl.tensor,
    arena_stride: tl.tensor,
    run_stride: tl.tensor,
    GATHER: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Copy one stretch of one block."""
    i = tl.program_id(0).to(tl.int64)
    w_W = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    slot = tl.load(slots + i).to(tl.int64)
    tl.device_assert(slot < num_slots, "a slot that the arena lacks")
    moved_W = w_W < tl.where(slot >= 0, num_words, 0)
    arena_W = arena + slot * arena_stride + w_W
    run_W = run + i * run_stride + w_W
    if GATHER:
        tl.store(run_W, tl.load(arena_W, mask=moved_W), mask=moved_W)
    else:
        tl.store(arena_W, tl.load(run_W, mask=moved_W), mask=moved_W)
