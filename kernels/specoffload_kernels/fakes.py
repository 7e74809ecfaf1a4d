"""Shapes and types of every operation's results; knows no values, so it runs on fake tensors.

Each function takes what the schema of its operation takes and names only what shapes depend on.
"""

from __future__ import annotations

from typing import Any

import torch

_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
_Score = tuple[torch.Tensor, torch.Tensor | None]


def paged_attention(
    q_BHQD: torch.Tensor,
    _arena_S2HTD: torch.Tensor,
    table_BN: torch.Tensor,
    _q_start_B: torch.Tensor,
    _kv_len_B: torch.Tensor,
    _scale: float,
    _window: int | None = None,
    _softcap: float | None = None,
    with_block_lse: bool = True,
) -> _Part:
    """Return ``out_BQHD``, ``lse_BHQ`` and ``block_lse_BHQN``, all float32 and contiguous."""
    num_rows, num_q_heads, num_q, head_dim = q_BHQD.shape
    shape_BHQ = (num_rows, num_q_heads, num_q)
    out_BQHD = q_BHQD.new_empty((num_rows, num_q, num_q_heads, head_dim), dtype=torch.float32)
    lse_BHQ = out_BQHD.new_empty(shape_BHQ)
    block_lse_BHQN = out_BQHD.new_empty((*shape_BHQ, table_BN.shape[1])) if with_block_lse else None
    return out_BQHD, lse_BHQ, block_lse_BHQN


def append(*_: object) -> None:
    """Return nothing: the arena is written in place."""


def merge(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    block_lses: list[torch.Tensor],
    _sinks_H: torch.Tensor | None = None,
) -> _Part:
    """Return what the parts have, of the same shapes and contiguous."""
    return (
        outs[0].new_empty(outs[0].shape),
        lses[0].new_empty(lses[0].shape),
        block_lses[0].new_empty(block_lses[0].shape) if block_lses else None,
    )


def block_mass(
    block_lse: torch.Tensor, _lse: torch.Tensor, num_kv_heads: int, _num_rows: torch.Tensor
) -> torch.Tensor:
    """Return ``[..., B, H, N]``."""
    return block_lse.new_empty((*block_lse.shape[:-3], num_kv_heads, block_lse.shape[-1]))


def digest(
    arena_S2HTD: torch.Tensor, slots_N: torch.Tensor, _num_tokens_N: torch.Tensor, *, bits: int
) -> tuple[torch.Tensor, ...]:
    """Return the fields of ``Digests``, in their order."""
    num, (_, _, num_heads, block_size, head_dim) = slots_N.shape[0], arena_S2HTD.shape
    shape_NHWTP = (num, num_heads, bits, block_size, (head_dim + 7) // 8)
    return (
        *(arena_S2HTD.new_empty((num, num_heads, head_dim)) for _ in range(3)),
        arena_S2HTD.new_empty(shape_NHWTP, dtype=torch.uint8),
        arena_S2HTD.new_empty((num, num_heads, block_size), dtype=torch.float16),
        slots_N.new_empty((num,), dtype=torch.int32),
    )


def digest_score(q_BHQD: torch.Tensor, *args: Any, rule: str, **_options: object) -> _Score:
    """Return the estimate, and the bound where it is another tensor."""
    _mean, _low, _high, _codes, _residual, _num_tokens, table_BN, *_positions = args
    shape_BHQN = (*q_BHQD.shape[:3], table_BN.shape[1])
    estimate_BHQN = q_BHQD.new_empty(shape_BHQN, dtype=torch.float32)
    return estimate_BHQN, torch.empty_like(estimate_BHQN) if rule == "shadow" else None


def gather_blocks(*_: object) -> None:
    """Return nothing: the run is written in place."""


def scatter_blocks(*_: object) -> None:
    """Return nothing: the arena is written in place."""
