"""Block mass on a GPU: one program for each row, kv head and run of blocks.

B rows, Hq query heads, H kv heads, Q query tokens, N blocks, R query rows of a kv head.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

CONSTANTS = {"ROWS": 8, "BLOCKS": 128}
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}


def block_mass(
    block_lse: torch.Tensor, lse: torch.Tensor, num_kv_heads: int, num_rows: torch.Tensor
) -> torch.Tensor:
    """Reduce per-block sums to masses; see ``specoffload_kernels.block_mass``.

    ``num_rows`` may lie on the CPU; if pinned, it must keep its values until the call has run.
    """
    block_lse, lse = block_lse.contiguous(), lse.contiguous()
    num_blocks, num_q = block_lse.shape[-1], lse.shape[-1]
    groups = lse.shape[-2] // num_kv_heads
    shape = (*lse.shape[:-2], num_kv_heads, num_blocks)
    mass = torch.empty(shape, dtype=torch.float32, device=lse.device)
    if mass.numel():
        with torch.cuda.device_of(mass):
            num_rows_B = num_rows.to(device=lse.device, dtype=torch.int64, non_blocking=True)
            grid = (mass.numel() // num_blocks, triton.cdiv(num_blocks, CONSTANTS["BLOCKS"]))
            mass_kernel[grid](
                block_lse,
                lse,
                num_rows_B.contiguous(),
                mass,
                num_rows_B.shape[0],
                num_kv_heads,
                groups,
                num_q,
                num_blocks,
                **CONSTANTS,
                **OPTIONS,
            )
    return mass


@triton.jit(do_not_specialize=["batch", "num_kv_heads", "groups", "num_q", "num_blocks"])
def mass_kernel(
    block_lse: tl.tensor,  # float32 [..., B, Hq, Q, N]
    lse: tl.tensor,  # float32 [..., B, Hq, Q]
    num_rows: tl.tensor,  # int64 [B]
    mass: tl.tensor,  # float32 [..., B, H, N]
    batch: tl.tensor,
    num_kv_heads: tl.tensor,
    groups: tl.tensor,
    num_q: tl.tensor,
    num_blocks: tl.tensor,
    ROWS: tl.constexpr,  # query rows of one step
    BLOCKS: tl.constexpr,  # blocks of one program
) -> None:
    """Average exp(block_lse - lse) over a kv head's query heads and used query tokens."""
    i = tl.program_id(0).to(tl.int64)  # counts kv heads: its query rows are [i * R, (i + 1) * R)
    used = tl.load(num_rows + i // num_kv_heads % batch).to(tl.int32)
    n_N = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    sum_N = tl.zeros((BLOCKS,), tl.float32)
    for start in range(0, groups * num_q, ROWS):
        r_R = start + tl.arange(0, ROWS)
        used_R = (r_R < groups * num_q) & (r_R % num_q < used)
        row_R = i * groups * num_q + r_R
        lse_R = tl.load(lse + row_R, mask=used_R, other=float("inf"))
        # Of a row that saw nothing, too, every share is to be 0.
        lse_R = tl.where(lse_R == float("-inf"), float("inf"), lse_R)
        block_lse_RN = tl.load(
            block_lse + row_R[:, None] * num_blocks + n_N[None, :],
            mask=used_R[:, None] & (n_N[None, :] < num_blocks),
            other=float("-inf"),
        )
        sum_N += tl.sum(tl.exp(block_lse_RN - lse_R[:, None]), 0)
    weight = 1.0 / (tl.maximum(used, 1) * groups).to(tl.float32)
    tl.store(mass + i * num_blocks + n_N, sum_N * weight, mask=n_N < num_blocks)
