"""The variants of every Triton kernel that the runtime uses, as the launches specialise them.

Needs Triton; compiles nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from specoffload_kernels.aot import Target, Variant
from specoffload_kernels.append import triton as append
from specoffload_kernels.block_mass import triton as block_mass
from specoffload_kernels.digest import triton as digest
from specoffload_kernels.digest_score import triton as digest_score
from specoffload_kernels.digest_score import triton_kernels as score_kernels
from specoffload_kernels.gather_blocks import triton as gather_blocks
from specoffload_kernels.merge import triton as merge
from specoffload_kernels.paged_attention import triton as paged_attention
from specoffload_kernels.paged_attention import triton_kernels as attention_kernels
from specoffload_kernels.paged_attention.tiling import tiling

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
_NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16"}
_QUERIES = {"decode": 1, "verify": 6, "prefill": 256}


def variants(target: Target) -> list[Variant]:
    """Return all variants for one kind of GPU."""
    anywhere = (_around_splits(), _merges(), _mass(), _appends(), _copies())
    return [*_splits(target), *itertools.chain(*anywhere, _digests(), _scores())]


def _splits(target: Target) -> Iterator[Variant]:
    for dtype in (BF16, F32):
        for head_dim in (64, 80, 128, 256):
            for rows in _QUERIES:
                yield _split(target, dtype, head_dim, rows)
    yield _split(target, F16, 128, "decode")
    yield _split(target, F16, 128, "prefill")
    for head_dim in (96, 112):
        yield _split(target, BF16, head_dim, "decode")
    for block_size in (4, 16, 32, 48, 128, 256):
        yield _split(target, BF16, 128, "decode", block_size=block_size)
    yield _split(target, BF16, 128, "verify", block_size=16)
    yield _split(target, F32, 64, "verify", block_size=16)
    yield _split(target, BF16, 256, "prefill", block_size=16)
    for rows in ("decode", "prefill"):
        yield _split(target, BF16, 128, rows, block_lse=False)
        yield _split(target, BF16, 128, rows, window=True)
    yield _split(target, BF16, 64, "verify", window=True, groups=8)
    yield _split(target, BF16, 256, "verify", softcap=True, groups=2)
    yield _split(target, BF16, 256, "prefill", softcap=True, window=True, groups=2)
    yield _split(target, F32, 128, "verify", softcap=True, window=True)


def _split(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    rows: str,
    *,
    block_size: int = 64,
    groups: int = 4,
    window: bool = False,
    softcap: bool = False,
    block_lse: bool = True,
) -> Variant:
    tile = tiling(target.vendor, dtype.itemsize, head_dim, groups * _QUERIES[rows])
    name = _NAMES[dtype]
    extras = {"window": window, "softcap": softcap, "no sums": not block_lse}
    label = f"{name} D {head_dim} T {block_size} G {groups} {rows}"
    constants = paged_attention.split_constants(
        dtype,
        dtype,
        head_dim,
        block_size,
        groups,
        tile,
        window=window,
        softcap=softcap,
        block_lse=block_lse,
    )
    strides = (
        *_strides("q_stride", "row", "head", "token"),
        *_strides("arena_stride", "slot", "kv", "head"),
    )
    return Variant(
        label=", ".join([label, *(extra for extra, is_so in extras.items() if is_so)]),
        kernel=attention_kernels.split_kernel,
        types={
            **dict.fromkeys(("q", "arena"), f"*{name}"),
            **dict.fromkeys(("slots", "blocks", "before"), "*i32"),
            **dict.fromkeys(("q_start", "kv_len"), "*i64"),
            **dict.fromkeys(("out", "lse", "block_lse"), "*fp32"),
            **dict.fromkeys((*strides, "num_q", "num_blocks", "num_splits", "window"), "i32"),
            **dict.fromkeys(("scale", "softcap"), "fp32"),
        },
        aligned=frozenset(strides),
        constants=constants,
        options=tile.options,
        tile_bytes=2 * tile.tokens * constants["HEAD_DIM_PAD"] * dtype.itemsize,
    )


def _around_splits() -> Iterator[Variant]:
    yield Variant(
        label="any table",
        kernel=attention_kernels.present_kernel,
        types={
            **dict.fromkeys(("table", "slots", "blocks", "before"), "*i32"),
            **dict.fromkeys(_strides("table_stride", "row", "block"), "i32"),
            **dict.fromkeys(("num_blocks", "num_slots"), "i32"),
        },
        constants=paged_attention.PRESENT_CONSTANTS,
        options=paged_attention.SMALL_OPTIONS,
    )
    for head_dim in (64, 80, 128, 256):
        yield Variant(
            label=f"D {head_dim}",
            kernel=attention_kernels.combine_kernel,
            types={
                **dict.fromkeys(("outs", "lses", "out", "lse"), "*fp32"),
                **dict.fromkeys(("num_splits", "num_rows", "num_q", "num_heads"), "i32"),
            },
            constants=paged_attention.combine_constants(head_dim),
            options=paged_attention.SMALL_OPTIONS,
        )


def _merges() -> Iterator[Variant]:
    for num_parts, sinks, block_lse in (
        (1, True, True),
        (2, False, True),
        (4, False, True),
        (merge.MAX_PARTS, True, True),
        (merge.MAX_PARTS, False, False),
    ):
        extras = {"sinks": sinks, "no sums": not block_lse}
        pointers = ("*fp32",) * num_parts
        yield Variant(
            label=", ".join([f"{num_parts} parts", *(name for name, on in extras.items() if on)]),
            kernel=merge.merge_kernel,
            types={
                **dict.fromkeys(("outs", "lses", "sums"), pointers),
                **dict.fromkeys(("sinks", "out", "lse", "block_lse"), "*fp32"),
                **dict.fromkeys(("num_q", "num_heads", "num_blocks"), "i32"),
            },
            constants=merge.merge_constants(num_parts, 128, sinks=sinks, block_lse=block_lse),
            options=merge.OPTIONS,
        )


def _mass() -> Iterator[Variant]:
    yield Variant(
        label="any",
        kernel=block_mass.mass_kernel,
        types={
            **dict.fromkeys(("block_lse", "lse", "mass"), "*fp32"),
            "num_rows": "*i64",
            **dict.fromkeys(("batch", "num_kv_heads", "groups", "num_q", "num_blocks"), "i32"),
        },
        constants=block_mass.CONSTANTS,
        options=block_mass.OPTIONS,
    )


def _appends() -> Iterator[Variant]:
    strides = _strides("arena_stride", "slot", "kv", "head", "token")
    strides += _strides("k_stride", "row", "head", "token")
    strides += _strides("v_stride", "row", "head", "token")
    channels = ("arena_stride_channel", "k_stride_channel", "v_stride_channel")
    for dtype, head_dim in ((BF16, 128), (F32, 80)):
        yield Variant(
            label=f"{_NAMES[dtype]} D {head_dim} T 64",
            kernel=append.append_kernel,
            types={
                **dict.fromkeys(("arena", "k", "v"), f"*{_NAMES[dtype]}"),
                **dict.fromkeys(("slots", "offsets"), "*i64"),
                **dict.fromkeys((*strides, "num_slots", "num_q"), "i32"),
            },
            aligned=frozenset(strides),
            constants={**append.append_constants(head_dim, 64), **dict.fromkeys(channels, 1)},
            options=append.OPTIONS,
        )


def _copies() -> Iterator[Variant]:
    for gather in (True, False):
        for bits in (16, 32):
            yield Variant(
                label=f"{'gather' if gather else 'scatter'}, {bits} bits",
                kernel=gather_blocks.copy_kernel,
                types={
                    **dict.fromkeys(("arena", "run"), f"*i{bits}"),
                    "slots": "*i64",
                    **dict.fromkeys(("num_slots", "num_words"), "i32"),
                    **dict.fromkeys(("arena_stride", "run_stride"), "i32"),
                },
                aligned=frozenset({"num_words", "arena_stride", "run_stride"}),
                constants=gather_blocks.copy_constants(bits // 8, gather=gather),
                options=gather_blocks.OPTIONS,
                tile_bytes=gather_blocks.STRETCH_BYTES,
                narrow_limit=60,  # an assertion on AMD prints through the host: 53 loads
            )


def _digests() -> Iterator[Variant]:
    for dtype, head_dim, bits in ((BF16, 128, 2), (BF16, 128, 4), (BF16, 256, 3), (F32, 80, 4)):
        yield Variant(
            label=f"{_NAMES[dtype]} D {head_dim} T 64, {bits} bits",
            kernel=digest.digest_kernel,
            types={
                **dict.fromkeys(("arena", "mean", "low", "high"), f"*{_NAMES[dtype]}"),
                **dict.fromkeys(("slots", "num_tokens"), "*i64"),
                "codes": "*u8",
                "residual": "*fp16",
                "used": "*i32",
                **dict.fromkeys(_strides("stride", "slot", "head", "token", "channel"), "i32"),
                "num_slots": "i32",
            },
            aligned=frozenset(_strides("stride", "slot", "head", "token")),
            constants={**digest.digest_constants(head_dim, 64, bits), "stride_channel": 1},
            options=digest.OPTIONS,
        )


def _scores() -> Iterator[Variant]:
    strides = _strides("q_stride", "row", "head", "token")
    counts = ("num_q", "num_blocks", "num_digests", "window")
    for dtype, head_dim, capped in ((BF16, 128, False), (F32, 80, False), (BF16, 256, True)):
        name = _NAMES[dtype]
        types = {
            **dict.fromkeys(("q", "low", "high"), f"*{name}"),
            "codes": "*u8",
            "residual": "*fp16",
            "num_tokens": "*i32",
            "table": "*i32",
            **dict.fromkeys(("q_start", "kv_len"), "*i64"),
            **dict.fromkeys(("estimate", "upper"), "*fp32"),
            **dict.fromkeys((*strides, *_strides("table_stride", "row", "block"), *counts), "i32"),
            **dict.fromkeys(("scale", "softcap"), "fp32"),
        }
        constants = digest_score.score_constants(head_dim, 64, 4, window=capped, softcap=capped)
        label = f"{name} D {head_dim} T 64 G 4{', window, softcap' if capped else ''}"
        yield Variant(
            label=f"{label}, 4 bits",
            kernel=score_kernels.shadow_kernel,
            types=types,
            aligned=frozenset(strides),
            constants={**constants, **digest_score.shadow_constants(64, 4)},
            options=digest_score.OPTIONS,
        )
        for box in (False, True):
            yield Variant(
                label=f"{label}, {'box' if box else 'mean'}",
                kernel=score_kernels.corner_kernel,
                types=types,
                aligned=frozenset(strides),
                constants={**constants, "BLOCKS": digest_score.CORNER_BLOCKS, "BOX": box},
                options=digest_score.OPTIONS,
            )


def _strides(prefix: str, *axes: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_{axis}" for axis in axes)
