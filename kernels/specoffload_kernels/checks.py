"""What is asked of the arguments that several operations share."""

from __future__ import annotations

import torch


def check_queries(
    q_BHQD: torch.Tensor,
    num_heads: int,
    key_dim: int,
    table_BN: torch.Tensor,
    q_start_B: torch.Tensor,
    kv_len_B: torch.Tensor,
    window: int | None,
) -> None:
    """Refuse queries, a table and positions that fit neither each other nor the keys.

    Raises:
        ValueError: The message names the shapes or types, and what they must be.
    """
    num_rows, num_q_heads, _, head_dim = q_BHQD.shape
    if key_dim != head_dim or num_q_heads % num_heads:
        raise ValueError(
            f"queries of shape {tuple(q_BHQD.shape)} [B, Hq, Q, D] do not fit keys of {num_heads} "
            f"heads of {key_dim}: D must be equal and Hq a multiple"
        )
    if (
        table_BN.dtype != torch.int32
        or q_start_B.dtype != torch.int64
        or kv_len_B.dtype != torch.int64
    ):
        raise ValueError(
            f"table, q_start and kv_len are {table_BN.dtype}, {q_start_B.dtype} and "
            f"{kv_len_B.dtype}; they must be int32, int64 and int64"
        )
    if (
        table_BN.shape[0] != num_rows
        or q_start_B.shape != (num_rows,)
        or kv_len_B.shape != (num_rows,)
    ):
        raise ValueError(
            f"{num_rows} rows of queries, but table, q_start and kv_len have shapes "
            f"{tuple(table_BN.shape)}, {tuple(q_start_B.shape)} and {tuple(kv_len_B.shape)}; "
            "each needs one entry a row"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1, or None for no window")
