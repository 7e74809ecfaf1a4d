"""The kernels of scores by digests on a GPU; knows layouts, and no policy.

``shadow_kernel`` reads the codes of a block back to keys and sums over its tokens;
``corner_kernel`` has one logit a block, for the box and the mean. Query tokens and the query heads
of a kv head are packed as the rows of a tile, as in paged attention; logarithms are to base 2
inside and to base e outside. Products are true float32: a bound must not be lost to rounding.

B rows, Hq query heads, H kv heads, G = Hq // H, Q query tokens, D head_dim, M digests, N blocks,
T tokens per block, W bit planes, P bytes of a plane.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl

from specoffload_kernels.triton_math import tanh

_LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def _query(
    q_R: tl.tensor,
    used_R: tl.tensor,
    first_d: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
) -> tl.tensor:
    """Load some channels of the rows' queries, times the scale."""
    d_D = first_d + tl.arange(0, DIMS)
    used_RD = used_R[:, None] & (d_D < HEAD_DIM)[None, :]
    return tl.load(q_R[:, None] + d_D[None, :], mask=used_RD, other=0.0).to(tl.float32) * scale


@triton.jit
def _add(max_R: tl.tensor, sum_R: tl.tensor, s_RT: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Add the exponentials of more logits to a sum that is kept relative to its largest."""
    new_max_R = tl.maximum(max_R, tl.max(s_RT, 1))
    finite_R = tl.where(new_max_R == float("-inf"), 0.0, new_max_R)
    sum_R = sum_R * tl.exp2(max_R - finite_R) + tl.sum(tl.exp2(s_RT - finite_R[:, None]), 1)
    return new_max_R, sum_R


@triton.jit(
    do_not_specialize=["num_q", "num_blocks", "num_digests", "window"],
    debug=True,
)
def shadow_kernel(
    q: tl.tensor,  # [B, Hq, Q, D] with strides, D contiguous
    low: tl.tensor,  # [M, H, D], as the next
    high: tl.tensor,
    codes: tl.tensor,  # uint8 [M, H, W, T, P]
    residual: tl.tensor,  # float16 [M, H, T]
    num_tokens: tl.tensor,  # int32 [M]
    table: tl.tensor,  # int32 [B, N] with strides
    q_start: tl.tensor,  # int64 [B]
    kv_len: tl.tensor,  # int64 [B]
    estimate: tl.tensor,  # float32 [B, Hq, Q, N], as the next
    upper: tl.tensor,
    q_stride_row: tl.tensor,
    q_stride_head: tl.tensor,
    q_stride_token: tl.tensor,
    table_stride_row: tl.tensor,
    table_stride_block: tl.tensor,
    num_q: tl.tensor,
    num_blocks: tl.tensor,
    num_digests: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,  # of the logits; over softcap if SOFTCAP, else times log2(e)
    softcap: tl.tensor,  # times log2(e)
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # channels of one step
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens of one step
    BLOCKS: tl.constexpr,  # blocks of one program
) -> None:
    """Score some blocks for a tile of packed rows of one kv head."""
    NUM_BYTES: tl.constexpr = (HEAD_DIM + 7) // 8
    tiles = tl.cdiv(num_q * GROUPS, ROWS)
    tile = tl.program_id(0) % tiles
    first_block = tl.program_id(0) // tiles * BLOCKS
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(1)

    r_R = tile * ROWS + tl.arange(0, ROWS)
    query_R = r_R // GROUPS
    head_R = h * GROUPS + r_R % GROUPS
    used_R = query_R < num_q
    q_pos_R = tl.load(q_start + b).to(tl.int32) + query_R
    q_R = q + b * q_stride_row + head_R.to(tl.int64) * q_stride_head
    q_R += query_R.to(tl.int64) * q_stride_token
    square_R = tl.zeros((ROWS,), tl.float32)
    for first_d in range(0, HEAD_DIM, DIMS):
        q_RD = _query(q_R, used_R, first_d, scale, HEAD_DIM, DIMS)
        square_R += tl.sum(q_RD * q_RD, 1)
    norm_R = tl.sqrt(square_R)
    out_R = ((b * num_heads * GROUPS + head_R) * num_q + query_R) * num_blocks
    stored = tl.load(kv_len + b).to(tl.int32)

    t_T = tl.arange(0, TOKENS)
    bit_8 = tl.arange(0, 8)
    for block in range(first_block, tl.minimum(first_block + BLOCKS, num_blocks)):
        index = tl.load(table + b * table_stride_row + block * table_stride_block).to(tl.int64)
        tl.device_assert(index < num_digests, "the table names a digest that is not there")
        entry = tl.maximum(index, 0) * num_heads + h
        end = tl.minimum(tl.load(num_tokens + tl.maximum(index, 0)), stored - block * BLOCK_SIZE)
        end = tl.where(index >= 0, end, 0)
        max_R = tl.full((ROWS,), float("-inf"), tl.float32)
        upper_max_R = max_R
        sum_R = tl.zeros((ROWS,), tl.float32)
        upper_sum_R = sum_R
        for start in range(0, end, TOKENS):
            token_T = start + t_T
            read_T = token_T < end
            s_RT = tl.zeros((ROWS, TOKENS), tl.float32)
            for first_d in range(0, HEAD_DIM, DIMS):
                q_RD = _query(q_R, used_R, first_d, scale, HEAD_DIM, DIMS)
                d_D = first_d + tl.arange(0, DIMS)
                at_D = entry * HEAD_DIM + d_D
                low_D = tl.load(low + at_D, mask=d_D < HEAD_DIM, other=0.0).to(tl.float32)
                high_D = tl.load(high + at_D, mask=d_D < HEAD_DIM, other=0.0).to(tl.float32)
                p_P = first_d // 8 + tl.arange(0, DIMS // 8)
                read_TP = read_T[:, None] & (p_P < NUM_BYTES)[None, :]
                code_TD = tl.zeros((TOKENS, DIMS), tl.int32)
                for w in tl.static_range(BITS):
                    at_T = ((entry * BITS + w) * BLOCK_SIZE + token_T) * NUM_BYTES
                    byte_TP = tl.load(codes + at_T[:, None] + p_P[None, :], mask=read_TP, other=0)
                    bit_TP8 = (byte_TP.to(tl.int32)[:, :, None] >> bit_8[None, None, :]) & 1
                    code_TD = code_TD * 2 + tl.reshape(bit_TP8, (TOKENS, DIMS))
                step_D = (high_D - low_D) / (2**BITS)
                k_TD = low_D[None, :] + (code_TD.to(tl.float32) + 0.5) * step_D[None, :]
                s_RT = tl.dot(q_RD, tl.trans(k_TD), s_RT, input_precision="ieee")
            gap_T = tl.load(residual + entry * BLOCK_SIZE + token_T, mask=read_T, other=0.0)
            upper_RT = s_RT + norm_R[:, None] * gap_T.to(tl.float32)[None, :]
            if SOFTCAP:
                s_RT = tanh(s_RT) * softcap
                upper_RT = tanh(upper_RT) * softcap
            pos_T = block * BLOCK_SIZE + token_T
            seen_RT = read_T[None, :] & (pos_T[None, :] <= q_pos_R[:, None])
            if WINDOW:
                seen_RT = seen_RT & (pos_T[None, :] > q_pos_R[:, None] - window)
            s_RT = tl.where(seen_RT, s_RT, float("-inf"))
            upper_RT = tl.where(seen_RT, upper_RT, float("-inf"))
            max_R, sum_R = _add(max_R, sum_R, s_RT)
            upper_max_R, upper_sum_R = _add(upper_max_R, upper_sum_R, upper_RT)
        max_R = tl.where(sum_R > 0.0, max_R, 0.0)
        upper_max_R = tl.where(upper_sum_R > 0.0, upper_max_R, 0.0)
        tl.store(estimate + out_R + block, (max_R + tl.log2(sum_R)) * _LN2, mask=used_R)
        tl.store(upper + out_R + block, (upper_max_R + tl.log2(upper_sum_R)) * _LN2, mask=used_R)


@triton.jit(
    do_not_specialize=["num_q", "num_blocks", "num_digests", "window"],
    debug=True,
)
def corner_kernel(
    q: tl.tensor,  # [B, Hq, Q, D] with strides, D contiguous
    low: tl.tensor,  # [M, H, D]; the mean unless BOX
    high: tl.tensor,  # likewise
    num_tokens: tl.tensor,  # int32 [M]
    table: tl.tensor,  # int32 [B, N] with strides
    q_start: tl.tensor,  # int64 [B]
    kv_len: tl.tensor,  # int64 [B]
    estimate: tl.tensor,  # float32 [B, Hq, Q, N]
    q_stride_row: tl.tensor,
    q_stride_head: tl.tensor,
    q_stride_token: tl.tensor,
    table_stride_row: tl.tensor,
    table_stride_block: tl.tensor,
    num_q: tl.tensor,
    num_blocks: tl.tensor,
    num_digests: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,  # of the logits; over softcap if SOFTCAP, else times log2(e)
    softcap: tl.tensor,  # times log2(e)
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # channels of one step
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of one program
    BOX: tl.constexpr,
) -> None:
    """Score some blocks for a tile of packed rows of one kv head, by one logit each."""
    tiles = tl.cdiv(num_q * GROUPS, ROWS)
    tile = tl.program_id(0) % tiles
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(1)

    r_R = tile * ROWS + tl.arange(0, ROWS)
    query_R = r_R // GROUPS
    head_R = h * GROUPS + r_R % GROUPS
    used_R = query_R < num_q
    q_pos_R = tl.load(q_start + b).to(tl.int32) + query_R
    q_R = q + b * q_stride_row + head_R.to(tl.int64) * q_stride_head
    q_R += query_R.to(tl.int64) * q_stride_token

    block_N = tl.program_id(0) // tiles * BLOCKS + tl.arange(0, BLOCKS)
    at_N = table + b * table_stride_row + block_N.to(tl.int64) * table_stride_block
    index_N = tl.load(at_N, mask=block_N < num_blocks, other=-1).to(tl.int64)
    tl.device_assert(index_N < num_digests, "the table names a digest that is not there")
    filled_N = tl.load(num_tokens + index_N, mask=index_N >= 0, other=0)
    s_RN = tl.zeros((ROWS, BLOCKS), tl.float32)
    for first_d in range(0, HEAD_DIM, DIMS):
        q_RD = _query(q_R, used_R, first_d, scale, HEAD_DIM, DIMS)
        d_D = first_d + tl.arange(0, DIMS)
        at_ND = (index_N * num_heads + h)[:, None] * HEAD_DIM + d_D[None, :]
        known_ND = (filled_N > 0)[:, None] & (d_D < HEAD_DIM)[None, :]
        high_ND = tl.load(high + at_ND, mask=known_ND, other=0.0).to(tl.float32)
        if BOX:
            low_ND = tl.load(low + at_ND, mask=known_ND, other=0.0).to(tl.float32)
            low_RD, q_RD = tl.minimum(q_RD, 0.0), tl.maximum(q_RD, 0.0)
            s_RN = tl.dot(low_RD, tl.trans(low_ND), s_RN, input_precision="ieee")
        s_RN = tl.dot(q_RD, tl.trans(high_ND), s_RN, input_precision="ieee")
    if SOFTCAP:
        s_RN = tanh(s_RN) * softcap

    first_N = block_N * BLOCK_SIZE
    end_N = tl.minimum(first_N + filled_N, tl.load(kv_len + b).to(tl.int32))
    end_RN = tl.minimum(end_N[None, :], q_pos_R[:, None] + 1)
    first_RN = first_N[None, :] + tl.zeros((ROWS, 1), tl.int32)
    if WINDOW:
        first_RN = tl.maximum(first_RN, q_pos_R[:, None] - window + 1)
    seen_RN = tl.maximum(end_RN - first_RN, 0).to(tl.float32)
    out_R = ((b * num_heads * GROUPS + head_R) * num_q + query_R) * num_blocks
    tl.store(
        estimate + out_R[:, None] + block_N[None, :],
        (s_RN + tl.log2(seen_RN)) * _LN2,
        mask=used_R[:, None] & (block_N < num_blocks)[None, :],
    )
