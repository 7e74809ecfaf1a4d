"""The kernels of paged attention on a GPU; knows the layout of the arena, and no policy.

``present_kernel`` lists each row's blocks that have a slot, so that absent ones cost nothing and
the splits share the rest evenly. ``split_kernel`` attends: query tokens and the query heads of a kv
head are packed as the rows of a tile (row r is token r // G, head r % G of the kv head), and each
program takes one tile of rows and one split of the blocks. ``combine_kernel`` merges the splits by
their log-sum-exp. Logarithms are to base 2 inside and to base e outside.

B rows, Hq query heads, H kv heads, G = Hq // H, Q query tokens, D head_dim, S slots, N blocks,
T tokens per block, P splits.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl

from specoffload_kernels.triton_math import tanh

_LN2 = tl.constexpr(math.log(2.0))


@triton.jit(
    do_not_specialize=["table_stride_row", "table_stride_block", "num_blocks", "num_slots"],
    do_not_specialize_on_alignment=["table"],
    debug=True,
)
def present_kernel(
    table: tl.tensor,  # int32 [B, N]
    slots: tl.tensor,  # int32 [B, N]
    blocks: tl.tensor,  # int32 [B, N]
    before: tl.tensor,  # int32 [B, N + 1]
    table_stride_row: tl.tensor,
    table_stride_block: tl.tensor,
    num_blocks: tl.tensor,
    num_slots: tl.tensor,
    LISTED: tl.constexpr,  # blocks of one step
) -> None:
    """List slot and number of every present block of row b, and how many precede each block."""
    b = tl.program_id(0).to(tl.int64)
    n_n = tl.arange(0, LISTED)
    count = tl.zeros((), tl.int32)
    tl.store(before + b * (num_blocks + 1), count)
    for start in range(0, num_blocks, LISTED):
        block_n = start + n_n
        known_n = block_n < num_blocks
        slot_n = tl.load(
            table + b * table_stride_row + block_n.to(tl.int64) * table_stride_block,
            mask=known_n,
            other=-1,
        )
        tl.device_assert(slot_n < num_slots, "the table names a slot that the arena lacks")
        present_n = slot_n >= 0
        upto_n = count + tl.cumsum(present_n.to(tl.int32), 0)
        tl.store(before + b * (num_blocks + 1) + block_n + 1, upto_n, mask=known_n)
        tl.store(slots + b * num_blocks + upto_n - 1, slot_n, mask=present_n)
        tl.store(blocks + b * num_blocks + upto_n - 1, block_n, mask=present_n)
        count += tl.sum(present_n.to(tl.int32), 0)


@triton.jit
def _log2_of_sum(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Logarithm of the sum of two numbers given by theirs, which may be -inf."""
    largest = tl.maximum(a, b)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    return finite + tl.log2(tl.exp2(a - finite) + tl.exp2(b - finite))


@triton.jit(do_not_specialize=["num_q", "num_blocks", "num_splits", "window"])
def split_kernel(
    q: tl.tensor,  # [B, Hq, Q, D] with strides, D contiguous
    arena: tl.tensor,  # [S, 2, H, T, D] with strides, [T, D] contiguous
    slots: tl.tensor,  # int32 [B, N], of present_kernel, as the next two
    blocks: tl.tensor,  # int32 [B, N]
    before: tl.tensor,  # int32 [B, N + 1]
    q_start: tl.tensor,  # int64 [B]
    kv_len: tl.tensor,  # int64 [B]
    out: tl.tensor,  # float32 [P, B, Q, Hq, D]
    lse: tl.tensor,  # float32 [P, B, Hq, Q], base e
    block_lse: tl.tensor,  # float32 [B, Hq, Q, N], base e, -inf before the call
    q_stride_row: tl.tensor,
    q_stride_head: tl.tensor,
    q_stride_token: tl.tensor,
    arena_stride_slot: tl.tensor,
    arena_stride_kv: tl.tensor,
    arena_stride_head: tl.tensor,
    num_q: tl.tensor,
    num_blocks: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,  # of the logits; times log2(e) unless SOFTCAP
    softcap: tl.tensor,  # times log2(e)
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,  # packed rows of one program
    TOKENS: tl.constexpr,  # tokens of one step: a part of a block, a block, or several
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_LSE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """Attend a tile of packed rows of one kv head to one split of the row's visible blocks."""
    STEPS: tl.constexpr = BLOCK_PAD // TOKENS if BLOCK_PAD > TOKENS else 1  # steps of a block
    BLOCKS: tl.constexpr = TOKENS // BLOCK_PAD if BLOCK_PAD < TOKENS else 1  # blocks of a step
    SUMS: tl.constexpr = BLOCKS if BLOCK_LSE else 1
    split = tl.program_id(0) % num_splits
    tile = tl.program_id(0) // num_splits
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(1)
    num_rows = tl.num_programs(2)

    r_R = tile * ROWS + tl.arange(0, ROWS)
    query_R = r_R // GROUPS
    head_R = h * GROUPS + r_R % GROUPS
    used_R = query_R < num_q
    d_D = tl.arange(0, HEAD_DIM_PAD)
    start = tl.load(q_start + b).to(tl.int32)
    q_pos_R = start + query_R
    q_R = q + b * q_stride_row + head_R.to(tl.int64) * q_stride_head
    q_R += query_R.to(tl.int64) * q_stride_token
    used_RD = used_R[:, None] & (d_D[None, :] < HEAD_DIM)
    q_RD = tl.load(q_R[:, None] + d_D[None, :], mask=used_RD, other=0.0).to(DOT_DTYPE)

    # Tokens [first, end) are what any row of the tile may see: nothing else is read.
    last_query = tl.minimum((tile * ROWS + ROWS - 1) // GROUPS, num_q - 1)
    end = tl.minimum(tl.load(kv_len + b).to(tl.int32), start + last_query + 1)
    end = tl.maximum(tl.minimum(end, num_blocks * BLOCK_SIZE), 0)
    first = tl.zeros((), tl.int32)
    if WINDOW:
        first = tl.maximum(start + tile * ROWS // GROUPS - window + 1, 0)
    listed_hi = tl.load(before + b * (num_blocks + 1) + tl.cdiv(end, BLOCK_SIZE))
    listed_lo = tl.load(
        before + b * (num_blocks + 1) + tl.minimum(first // BLOCK_SIZE, tl.cdiv(end, BLOCK_SIZE))
    )
    share = tl.cdiv(tl.cdiv(listed_hi - listed_lo, BLOCKS), num_splits) * BLOCKS
    listed_lo = listed_lo + split * share
    listed_hi = tl.minimum(listed_hi, listed_lo + share)
    num_steps = tl.cdiv(tl.maximum(listed_hi - listed_lo, 0), BLOCKS) * STEPS

    kv = arena + h.to(tl.int64) * arena_stride_head
    t_T = tl.arange(0, TOKENS)
    block_lse_R = block_lse + ((b * num_heads * GROUPS + head_R) * num_q + query_R) * num_blocks
    acc_RD = tl.zeros((ROWS, HEAD_DIM_PAD), tl.float32)
    max_R = tl.full((ROWS,), float("-inf"), tl.float32)
    sum_R = tl.zeros((ROWS,), tl.float32)
    block_lse_RN = tl.full((ROWS, SUMS), float("-inf"), tl.float32)
    for step in range(num_steps):
        listed = listed_lo + step // STEPS * BLOCKS
        if BLOCKS == 1:
            block = tl.load(blocks + b * num_blocks + listed)
            slot = tl.load(slots + b * num_blocks + listed)
            kv_T = kv + slot.to(tl.int64) * arena_stride_slot + tl.zeros((TOKENS,), tl.int32)
            token_T = step % STEPS * TOKENS + t_T
            pos_T = block * BLOCK_SIZE + token_T
            read_T = (token_T < BLOCK_SIZE) & (pos_T >= first) & (pos_T < end)
        else:
            listed_T = listed + t_T // BLOCK_PAD
            here_T = listed_T < listed_hi
            block_T = tl.load(blocks + b * num_blocks + listed_T, mask=here_T, other=0)
            slot_T = tl.load(slots + b * num_blocks + listed_T, mask=here_T, other=0)
            kv_T = kv + slot_T.to(tl.int64) * arena_stride_slot
            token_T = t_T % BLOCK_PAD
            pos_T = block_T * BLOCK_SIZE + token_T
            read_T = here_T & (token_T < BLOCK_SIZE) & (pos_T >= first) & (pos_T < end)
        kv_TD = kv_T[:, None] + token_T[:, None] * HEAD_DIM + d_D[None, :]
        read_TD = read_T[:, None] & (d_D[None, :] < HEAD_DIM)

        k_TD = tl.load(kv_TD, mask=read_TD, other=0.0)
        s_RT = tl.dot(q_RD, tl.trans(k_TD).to(DOT_DTYPE), input_precision="ieee") * scale
        if SOFTCAP:
            s_RT = tanh(s_RT) * softcap
        seen_RT = read_T[None, :] & (pos_T[None, :] <= q_pos_R[:, None])
        if WINDOW:
            seen_RT = seen_RT & (pos_T[None, :] > q_pos_R[:, None] - window)
        s_RNT = tl.reshape(tl.where(seen_RT, s_RT, float("-inf")), (ROWS, SUMS, TOKENS // SUMS))

        # With the sums of blocks, each exponential is taken once, against the largest of its own
        # block, so that the sum stays exact however small its share; a factor brings it to the
        # row's. Without them, at once against the row's largest.
        max_RN = tl.max(s_RNT, 2)
        new_max_R = tl.maximum(max_R, tl.max(max_RN, 1))
        finite_R = tl.where(new_max_R == float("-inf"), 0.0, new_max_R)
        own_RN = tl.where(max_RN == float("-inf"), 0.0, max_RN)
        base_RN = own_RN if BLOCK_LSE else finite_R[:, None]
        p_RNT = tl.exp2(s_RNT - base_RN[:, :, None])
        sum_RN = tl.sum(p_RNT, 2)
        if BLOCK_LSE:
            lse_RN = base_RN + tl.log2(sum_RN)
            if STEPS > 1:
                # Stored at every step of a block, by the same threads: the last is the whole.
                block_lse_RN = tl.where(step % STEPS == 0, float("-inf"), block_lse_RN)
                lse_RN = _log2_of_sum(block_lse_RN, lse_RN)
                block_lse_RN = lse_RN
            listed_N = listed + tl.arange(0, SUMS)
            here_N = listed_N < listed_hi
            block_N = tl.load(blocks + b * num_blocks + listed_N, mask=here_N, other=0)
            tl.store(
                block_lse_R[:, None] + block_N[None, :],
                lse_RN * _LN2,
                mask=used_R[:, None] & here_N[None, :],
            )
            factor_RN = tl.exp2(max_RN - finite_R[:, None])
            p_RNT = p_RNT * factor_RN[:, :, None]
            sum_RN = sum_RN * factor_RN
        decay_R = tl.exp2(max_R - finite_R)
        sum_R = sum_R * decay_R + tl.sum(sum_RN, 1)
        max_R = new_max_R

        v_TD = tl.load(kv_TD + arena_stride_kv, mask=read_TD, other=0.0)
        p_RT = tl.reshape(p_RNT, (ROWS, TOKENS)).to(v_TD.dtype).to(DOT_DTYPE)
        acc_RD = tl.dot(p_RT, v_TD.to(DOT_DTYPE), acc_RD * decay_R[:, None], input_precision="ieee")

    finite_R = tl.where(max_R == float("-inf"), 0.0, max_R)
    # A split without blocks writes its lse alone, unless it is the only one.
    num_written = tl.where((num_steps > 0) | (num_splits == 1), num_q, 0)
    part_R = ((split * num_rows + b) * num_q + query_R) * (num_heads * GROUPS) + head_R
    tl.store(
        out + part_R[:, None] * HEAD_DIM + d_D[None, :],
        acc_RD / tl.where(sum_R > 0.0, sum_R, 1.0)[:, None],
        mask=(query_R < num_written)[:, None] & (d_D[None, :] < HEAD_DIM),
    )
    part_R = ((split * num_rows + b) * (num_heads * GROUPS) + head_R) * num_q + query_R
    tl.store(lse + part_R, (finite_R + tl.log2(sum_R)) * _LN2, mask=used_R)


@triton.jit(do_not_specialize=["num_splits", "num_rows", "num_q", "num_heads"])
def combine_kernel(
    outs: tl.tensor,  # float32 [P, B, Q, Hq, D], of split_kernel, as the next
    lses: tl.tensor,  # float32 [P, B, Hq, Q]
    out: tl.tensor,  # float32 [B, Q, Hq, D]
    lse: tl.tensor,  # float32 [B, Hq, Q]
    num_splits: tl.tensor,
    num_rows: tl.tensor,
    num_q: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,  # at least num_splits
    COMBINED: tl.constexpr,  # splits of one step
) -> None:
    """Merge the splits of one query: one program for each row, query and head."""
    i = tl.program_id(0).to(tl.int64)
    b = i // (num_q * num_heads)
    query = i // num_heads % num_q
    head = i % num_heads
    j = (b * num_heads + head) * num_q + query
    num_queries = num_rows.to(tl.int64) * num_q * num_heads
    p_P = tl.arange(0, SPLITS)
    lse_P = tl.load(lses + p_P * num_queries + j, mask=p_P < num_splits, other=float("-inf"))
    largest = tl.max(lse_P, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(lse_P - largest), 0)
    total_lse = largest + tl.log(total)
    tl.store(lse + j, total_lse)
    total_safe = tl.where(total_lse == float("-inf"), 0.0, total_lse)
    d_D = tl.arange(0, HEAD_DIM_PAD)
    acc_D = tl.zeros((HEAD_DIM_PAD,), tl.float32)
    for start in range(0, num_splits, COMBINED):
        p_C = start + tl.arange(0, COMBINED)
        lse_C = tl.load(lses + p_C * num_queries + j, mask=p_C < num_splits, other=float("-inf"))
        # A split without blocks has left its output as it was.
        out_CD = tl.load(
            outs + (p_C * num_queries + i)[:, None] * HEAD_DIM + d_D[None, :],
            mask=(lse_C > float("-inf"))[:, None] & (d_D[None, :] < HEAD_DIM),
            other=0.0,
        )
        acc_D += tl.sum(out_CD * tl.exp(lse_C - total_safe)[:, None], 0)
    tl.store(out + i * HEAD_DIM + d_D, acc_D, mask=d_D < HEAD_DIM)
