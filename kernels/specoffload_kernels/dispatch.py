"""The public operations: checks arguments and calls what torch knows under their names.

Torch picks the path by device; see ``registry``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specoffload_kernels.checks import check_queries
from specoffload_kernels.digests import MAX_BITS, DigestRule, Digests, DigestScore
from specoffload_kernels.part import AttentionPart
from specoffload_kernels.registry import OPERATIONS

_paged_attention = OPERATIONS["paged_attention"].overload
_append = OPERATIONS["append"].overload
_merge = OPERATIONS["merge"].overload
_block_mass = OPERATIONS["block_mass"].overload
_digest = OPERATIONS["digest"].overload
_digest_score = OPERATIONS["digest_score"].overload


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
    """Attend to the blocks of a table that have a slot, in place.

    Token t of block j of row b is at position ``j * T + t``, in slot ``table_BN[b, j]``. Query i,
    at position ``q_start_B[b] + i``, sees it if its position is not after the query's, is below
    ``kv_len_B[b]``, and is less than ``window`` behind the query. Nothing else is read: unused
    slots and positions may hold NaN.

    Args:
        q_BHQD: Queries, ``[B, Hq, Q, D]``, any strides with D contiguous; Hq a multiple of H.
        arena_S2HTD: K and V, ``[S, 2, H, T, D]``, each ``[T, D]`` contiguous.
        table_BN: int32 slot per block; -1 = not here, skip.
        q_start_B: int64 position of each row's first query; on the CPU if the arena is.
        kv_len_B: int64 number of tokens stored for each row, counting those in absent blocks.
        scale: Factor on the logits.
        window: Number of tokens a query sees, itself included; None = all before it.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        with_block_lse: Return the per-block sums, too.

    Returns:
        Attention over the visible tokens; a query that sees nothing has out 0 and lse -inf.

    Raises:
        ValueError: Shapes or types do not fit each other.
        IndexError: The table names a slot that the arena lacks; a Triton kernel stops instead.
    """
    _, _, num_heads, _, key_dim = _arena_shape(arena_S2HTD)
    check_queries(q_BHQD, num_heads, key_dim, table_BN, q_start_B, kv_len_B, window)
    out_BQHD, lse_BHQ, block_lse_BHQN = _paged_attention(
        q_BHQD,
        arena_S2HTD,
        table_BN,
        q_start_B,
        kv_len_B,
        scale,
        window,
        softcap,
        with_block_lse,
    )
    return AttentionPart(out_BQHD=out_BQHD, lse_BHQ=lse_BHQ, block_lse_BHQN=block_lse_BHQN)


def append(
    arena_S2HTD: torch.Tensor,
    k_BHQD: torch.Tensor,
    v_BHQD: torch.Tensor,
    slots_BQ: torch.Tensor,
    offsets_BQ: torch.Tensor,
) -> None:
    """Write token i of row b to position ``offsets_BQ[b, i]`` of slot ``slots_BQ[b, i]``.

    Slot -1 skips the token (padding of ragged rows). No two tokens may name the same place.

    Args:
        arena_S2HTD: ``[S, 2, H, T, D]``, written in place.
        k_BHQD: Keys of the new tokens, ``[B, H, Q, D]``.
        v_BHQD: Values of the new tokens, ``[B, H, Q, D]``.
        slots_BQ: Integer slots, ``[B, Q]``.
        offsets_BQ: Integer positions within the slot, ``[B, Q]``.

    Raises:
        ValueError: Shapes do not fit each other.
        IndexError: A token's slot or position lies outside the arena; nothing was written. A Triton
            kernel stops instead.
    """
    _, _, num_heads, _, head_dim = _arena_shape(arena_S2HTD)
    rows_and_tokens = (k_BHQD.shape[0], k_BHQD.shape[2])
    if (
        k_BHQD.shape != v_BHQD.shape
        or k_BHQD.shape[1] != num_heads
        or k_BHQD.shape[3] != head_dim
        or slots_BQ.shape != rows_and_tokens
        or offsets_BQ.shape != rows_and_tokens
    ):
        raise ValueError(
            f"keys {tuple(k_BHQD.shape)}, values {tuple(v_BHQD.shape)} [B, H, Q, D], slots "
            f"{tuple(slots_BQ.shape)} and offsets {tuple(offsets_BQ.shape)} [B, Q] must fit each "
            f"other and the arena {tuple(arena_S2HTD.shape)} [S, 2, H, T, D]"
        )
    _append(arena_S2HTD, k_BHQD, v_BHQD, slots_BQ, offsets_BQ)


def merge(parts: Sequence[AttentionPart], *, sinks_H: torch.Tensor | None = None) -> AttentionPart:
    """Combine parts over disjoint sets of blocks into the attention over their union.

    Args:
        parts: At least one part, all of the same shape. A block present in none of them keeps -inf.
        sinks_H: One logit per query head, ``[Hq]`` (GPT-OSS). It takes part only in the
            normalisation of ``out_BQHD``; the sums stay without it, so that masses still sum to 1.

    Returns:
        The merged part; ``block_lse_BHQN`` is None unless every part has it. A single part without
        sinks is returned as it is.

    Raises:
        ValueError: No parts.
    """
    if not parts:
        raise ValueError("merge got 0 parts and needs at least 1")
    if len(parts) == 1 and sinks_H is None:
        return parts[0]
    block_lses = [part.block_lse_BHQN for part in parts if part.block_lse_BHQN is not None]
    out_BQHD, lse_BHQ, block_lse_BHQN = _merge(
        [part.out_BQHD for part in parts],
        [part.lse_BHQ for part in parts],
        block_lses if len(block_lses) == len(parts) else [],
        sinks_H,
    )
    return AttentionPart(out_BQHD=out_BQHD, lse_BHQ=lse_BHQ, block_lse_BHQN=block_lse_BHQN)


def block_mass(
    block_lse: torch.Tensor, lse: torch.Tensor, num_kv_heads: int, num_rows: torch.Tensor
) -> torch.Tensor:
    """Return each block's softmax mass per kv head, averaged over its query heads and used rows.

    Args:
        block_lse: ``[..., B, Hq, Q, N]`` float32.
        lse: ``[..., B, Hq, Q]`` float32.
        num_kv_heads: H, a divisor of Hq.
        num_rows: ``[B]`` integers; only the first ``num_rows[b]`` of the Q query rows are used.

    Returns:
        ``[..., B, H, N]`` float32; sums to 1 over the blocks where every used row saw something,
        to 0 where no row is used.

    Raises:
        ValueError: Hq is not a multiple of H.
    """
    if lse.shape[-2] % num_kv_heads:
        raise ValueError(
            f"block_mass got {lse.shape[-2]} query heads for {num_kv_heads} kv heads; "
            "the first must be a multiple of the second"
        )
    mass: torch.Tensor = _block_mass(block_lse, lse, num_kv_heads, num_rows)
    return mass


def digest(
    arena_S2HTD: torch.Tensor,
    slots_N: torch.Tensor,
    num_tokens_N: torch.Tensor,
    *,
    bits: int = 4,
) -> Digests:
    """Summarise the keys of slots; see ``Digests``, and ``digest_bytes`` for what it takes.

    Args:
        arena_S2HTD: ``[S, 2, H, T, D]``; nothing but the keys of the tokens named is read.
        slots_N: Integer slots, ``[N]``; -1 gives the digest of no tokens.
        num_tokens_N: Integers, ``[N]``: only the first so many tokens of the slot are used.
        bits: Of the codes, for each channel of each key. 2 rank blocks nearly as their keys do; 4
            give a bound that is worth having.

    Returns:
        One digest for each slot. Digests of blocks that are not full go stale as tokens follow.

    Raises:
        ValueError: Shapes or types do not fit each other, or there are too many bits.
        IndexError: There is no such slot; a Triton kernel stops instead.
    """
    _arena_shape(arena_S2HTD)
    if slots_N.ndim != 1 or slots_N.shape != num_tokens_N.shape:
        raise ValueError(
            f"slots and num_tokens have shapes {tuple(slots_N.shape)} and "
            f"{tuple(num_tokens_N.shape)}; both must be [N]"
        )
    if not 0 <= bits <= MAX_BITS:
        raise ValueError(f"bits is {bits}; it must be 0 to {MAX_BITS}")
    return Digests.of(_digest(arena_S2HTD, slots_N, num_tokens_N, bits=bits))


def digest_score(
    q_BHQD: torch.Tensor,
    digests: Digests,
    table_BN: torch.Tensor,
    q_start_B: torch.Tensor,
    kv_len_B: torch.Tensor,
    *,
    rule: DigestRule = DigestRule.SHADOW,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> DigestScore:
    """Score blocks by their digests, as ``paged_attention`` would sum them by their keys.

    Arguments are those of ``paged_attention``, but the table names entries of ``digests`` instead
    of slots. Tokens that a digest was not made from count as absent.

    Raises:
        ValueError: Shapes or types do not fit each other.
        IndexError: The table names a digest that is not there; a Triton kernel stops instead.
    """
    _, num_heads, key_dim = digests.low_NHD.shape
    check_queries(q_BHQD, num_heads, key_dim, table_BN, q_start_B, kv_len_B, window)
    estimate_BHQN, upper_BHQN = _digest_score(
        q_BHQD,
        *digests.tensors,
        table_BN,
        q_start_B,
        kv_len_B,
        rule=rule.value,
        scale=scale,
        window=window,
        softcap=softcap,
    )
    if rule is DigestRule.BOX:
        upper_BHQN = estimate_BHQN
    return DigestScore(estimate_BHQN=estimate_BHQN, upper_BHQN=upper_BHQN)


def _arena_shape(arena_S2HTD: torch.Tensor) -> torch.Size:
    if arena_S2HTD.ndim != 5 or arena_S2HTD.shape[1] != 2:
        raise ValueError(
            f"the arena has shape {tuple(arena_S2HTD.shape)}; it must be [S, 2, H, T, D]"
        )
    return arena_S2HTD.shape
