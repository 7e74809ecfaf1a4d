"""Paged attention in plain torch, on any device: gathers the visible blocks, then attends.

Two shapes of the same thing. ``attend`` materialises the logits and serves few query tokens, soft
caps and per-block sums. ``prefill`` hands contiguous K and V to torch's flash kernel for CPUs and
serves many query tokens. Neither loops over blocks.

B rows, Hq query heads, H kv heads, G = Hq // H, Q query tokens, D head_dim, S slots, N blocks,
T tokens per block, R = G * Q packed rows, K gathered tokens.
"""

from __future__ import annotations

import torch

from specoffload_kernels.part import AttentionPart

_LOGITS_BYTES = 64 << 20  # bound on the logits of one step of ``attend``
_MASKED_QUERIES = 256  # query tokens of one masked flash call: bounds the mask, and wasted work


def attend(
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
    """Attend by materialised logits, a bounded number of query tokens at a time.

    Shapes and semantics are those of ``specoffload_kernels.paged_attention``.
    """
    num_rows, num_q_heads, num_q, head_dim = q_BHQD.shape
    num_heads, block_size = arena_S2HTD.shape[2:4]
    groups = num_q_heads // num_heads
    num_blocks = table_BN.shape[1]
    device = q_BHQD.device
    q_start_B, kv_len_B = q_start_B.to(device), kv_len_B.to(device)

    pos_NT = torch.arange(num_blocks * block_size, device=device).view(num_blocks, block_size)
    first_B = q_start_B - (window - 1) if window is not None else torch.zeros_like(q_start_B)
    end_B = torch.minimum(kv_len_B, q_start_B + num_q)
    used_BNT = (pos_NT >= first_B[:, None, None]) & (pos_NT < end_B[:, None, None])
    used_BNT &= (table_BN >= 0)[:, :, None]

    kv_BN2HTD = arena_S2HTD[table_BN.clamp(min=0).long()].float()
    # Memory outside the visible range may hold NaN, which 0 * NaN would carry into the sums.
    kv_BN2HTD = kv_BN2HTD.masked_fill(~used_BNT[:, :, None, None, :, None], 0.0)
    k_BHKD, v_BHKD = kv_BN2HTD.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)

    logits_bytes_per_q = max(1, num_rows * num_q_heads * num_blocks * block_size * 4)
    step = max(1, _LOGITS_BYTES // logits_bytes_per_q)
    outs, lses, block_lses = [], [], []
    for start in range(0, num_q, step):
        q_BHqD = q_BHQD[:, :, start : start + step].float()
        q_BHGqD = torch.unflatten(q_BHqD, 1, (num_heads, groups))
        q_pos_Bq = q_start_B[:, None] + torch.arange(start, start + q_BHGqD.shape[3], device=device)
        seen_BqNT = used_BNT[:, None] & (pos_NT <= q_pos_Bq[:, :, None, None])
        if window is not None:
            seen_BqNT &= pos_NT > q_pos_Bq[:, :, None, None] - window
        s_BHRK = torch.matmul(q_BHGqD.flatten(2, 3) * scale, k_BHKD.transpose(-1, -2))
        if softcap is not None:
            s_BHRK = softcap * torch.tanh(s_BHRK / softcap)
        s_BHRNT = torch.unflatten(s_BHRK, 3, (num_blocks, block_size))
        s_BHGqNT = torch.unflatten(s_BHRNT, 2, (groups, -1))
        s_BHGqNT = s_BHGqNT.masked_fill(~seen_BqNT[:, None, None], -torch.inf)
        block_lse_BHGqN = s_BHGqNT.logsumexp(-1)
        lse_BHGq = block_lse_BHGqN.logsumexp(-1)
        safe_BHGq = lse_BHGq.masked_fill(lse_BHGq.isneginf(), 0.0)
        p_BHGqNT = torch.exp(s_BHGqNT - safe_BHGq[..., None, None])
        out_BHRD = torch.matmul(p_BHGqNT.flatten(4, 5).flatten(2, 3), v_BHKD)
        out_BHqD = torch.unflatten(out_BHRD, 2, (groups, -1)).flatten(1, 2)
        outs.append(out_BHqD.transpose(1, 2))
        lses.append(lse_BHGq.flatten(1, 2))
        if with_block_lse:
            block_lses.append(block_lse_BHGqN.flatten(1, 2))
    if not outs:
        empty = q_BHQD.new_empty((num_rows, num_q_heads, 0), dtype=torch.float32)
        return AttentionPart(
            out_BQHD=empty.new_empty((num_rows, 0, num_q_heads, head_dim)),
            lse_BHQ=empty,
            block_lse_BHQN=empty.new_empty((*empty.shape, num_blocks)) if with_block_lse else None,
        )
    return AttentionPart(
        out_BQHD=torch.cat(outs, 1),
        lse_BHQ=torch.cat(lses, 2),
        block_lse_BHQN=torch.cat(block_lses, 2) if with_block_lse else None,
    )


def prefill(
    q_BHQD: torch.Tensor,
    arena_S2HTD: torch.Tensor,
    table_BN: torch.Tensor,
    q_start_B: torch.Tensor,
    kv_len_B: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> AttentionPart:
    """Attend by torch's flash kernel for CPUs, one row of the batch at a time.

    Tokens before the first query go unmasked, the queries' own tokens causally; a mask is built
    only for sliding windows that cut into the tokens, or when one of the queries' own blocks is
    absent. No per-block sums. With bfloat16 input the parts that are merged are rounded to it.
    """
    num_rows, num_q_heads, num_q, head_dim = q_BHQD.shape
    block_size = arena_S2HTD.shape[3]
    out_BQHD = q_BHQD.new_empty((num_rows, num_q, num_q_heads, head_dim), dtype=torch.float32)
    lse_BHQ = out_BQHD.new_empty((num_rows, num_q_heads, num_q))
    end_B = torch.minimum(kv_len_B, q_start_B + num_q).clamp(max=table_BN.shape[1] * block_size)
    starts, ends = q_start_B.tolist(), end_B.tolist()
    for row, (q_start, end) in enumerate(zip(starts, ends, strict=True)):
        first = max(0, q_start - window + 1) if window is not None else 0
        j_lo = min(first // block_size, table_BN.shape[1])
        slots_n = table_BN[row, j_lo : max(j_lo, -(-end // block_size))]
        k_HKD, v_HKD, pos_K = _gather(arena_S2HTD, slots_n, j_lo, first, end)
        out_QHD, lse_HQ = _attend_row(
            q_BHQD[row], k_HKD, v_HKD, pos_K, q_start=q_start, end=end, scale=scale, window=window
        )
        out_BQHD[row] = out_QHD
        lse_BHQ[row] = lse_HQ
    return AttentionPart(out_BQHD=out_BQHD, lse_BHQ=lse_BHQ, block_lse_BHQN=None)


def _gather(
    arena_S2HTD: torch.Tensor, slots_n: torch.Tensor, j_lo: int, first: int, end: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Copy tokens [first, end) of the present blocks out of the arena.

    Returns K, V and the tokens' positions, or None in place of the positions if no block is absent
    so that they run from ``first``.
    """
    num_heads, block_size, head_dim = arena_S2HTD.shape[2:]
    present_n = slots_n >= 0
    complete = bool(present_n.all())
    chosen = slots_n if complete else slots_n[present_n]
    kv_2HKD = arena_S2HTD.new_empty((2, num_heads, chosen.shape[0] * block_size, head_dim))
    kv_n2HTD = kv_2HKD.view(2, num_heads, -1, block_size, head_dim).permute(2, 0, 1, 3, 4)
    kv_n2HTD.copy_(arena_S2HTD[chosen.long()])
    base = j_lo * block_size
    if complete:
        kv_2HKD = kv_2HKD[:, :, first - base : max(first, end) - base]
        return kv_2HKD[0], kv_2HKD[1], None
    pos_nT = torch.arange(slots_n.shape[0] * block_size).view(-1, block_size) + base
    pos_K = pos_nT[present_n].flatten()
    keep_K = (pos_K >= first) & (pos_K < end)
    kv_2HKD = kv_2HKD[:, :, keep_K]
    return kv_2HKD[0], kv_2HKD[1], pos_K[keep_K]


def _attend_row(
    q_HQD: torch.Tensor,
    k_HKD: torch.Tensor,
    v_HKD: torch.Tensor,
    pos_K: torch.Tensor | None,
    *,
    q_start: int,
    end: int,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_q, num_k = q_HQD.shape[1], k_HKD.shape[1]
    uncut = window is None or q_start + num_q <= window
    own = max(0, end - q_start)  # tokens at or after the first query
    if uncut and (pos_K is None or int((pos_K >= q_start).sum()) == own):
        own = min(own, num_k)
        history = num_k - own
        parts = []
        if history:
            parts.append(_flash(q_HQD, k_HKD[:, :history], v_HKD[:, :history], scale=scale))
        if own:
            parts.append(
                _flash(q_HQD, k_HKD[:, history:], v_HKD[:, history:], scale=scale, causal=True)
            )
        return _merge_row(parts, q_HQD)
    if pos_K is None:
        first = end - num_k
        pos_K = torch.arange(first, end)
    outs, lses = [], []
    for start in range(0, num_q, _MASKED_QUERIES):
        q_HqD = q_HQD[:, start : start + _MASKED_QUERIES]
        q_pos_q = torch.arange(q_start + start, q_start + start + q_HqD.shape[1])
        lo = int((pos_K <= q_pos_q[0] - window).sum()) if window is not None else 0
        hi = int((pos_K <= q_pos_q[-1]).sum())
        seen_qK = pos_K[lo:hi] <= q_pos_q[:, None]
        if window is not None:
            seen_qK &= pos_K[lo:hi] > q_pos_q[:, None] - window
        mask_qK = q_HQD.new_zeros(seen_qK.shape).masked_fill_(~seen_qK, -torch.inf)
        parts = []
        if hi > lo:
            parts.append(
                _flash(q_HqD, k_HKD[:, lo:hi], v_HKD[:, lo:hi], scale=scale, mask_qK=mask_qK)
            )
        out_qHD, lse_Hq = _merge_row(parts, q_HqD)
        blind_q = ~seen_qK.any(-1)
        outs.append(out_qHD.masked_fill(blind_q[:, None, None], 0.0))
        lses.append(lse_Hq.masked_fill(blind_q, -torch.inf))
    return torch.cat(outs), torch.cat(lses, 1)


def _flash(
    q_HQD: torch.Tensor,
    k_HKD: torch.Tensor,
    v_HKD: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask_qK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call of the flash kernel: out [Hq, Q, D] in q's type, log-sum-exp [Hq, Q] float32."""
    groups = q_HQD.shape[0] // k_HKD.shape[0]
    # The kv heads are the batch and a group's query heads share K and V by a stride of 0: no copy.
    k_HGKD = k_HKD[:, None].expand(-1, groups, -1, -1)
    v_HGKD = v_HKD[:, None].expand(-1, groups, -1, -1)
    out_HGQD, lse_HGQ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        torch.unflatten(q_HQD, 0, (-1, groups)),
        k_HGKD,
        v_HGKD,
        0.0,
        causal,
        attn_mask=None if mask_qK is None else mask_qK[None, None],
        scale=scale,
    )
    return out_HGQD.flatten(0, 1), lse_HGQ.flatten(0, 1)


def _merge_row(
    parts: list[tuple[torch.Tensor, torch.Tensor]], q_HQD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge at most two parts of one row to out [Q, Hq, D] and log-sum-exp [Hq, Q], float32."""
    if not parts:
        zeros_QHD = q_HQD.new_zeros(q_HQD.shape, dtype=torch.float32).transpose(0, 1)
        return zeros_QHD, zeros_QHD.new_full(q_HQD.shape[:2], -torch.inf)
    out_HQD, lse_HQ = parts[0]
    out_HQD = out_HQD.float()
    for other_HQD, other_lse_HQ in parts[1:]:
        # Both are finite: history is seen by every query, and every query sees its own tokens.
        weight_HQ = torch.sigmoid(other_lse_HQ - lse_HQ)
        out_HQD = torch.lerp(out_HQD, other_HQD.float(), weight_HQ[..., None])
        lse_HQ = torch.logaddexp(lse_HQ, other_lse_HQ)
    return out_HQD.transpose(0, 1), lse_HQ
