"""Attention over paged KV and its by-products; knows nothing of models, tiers or moves.

Legend of the shape suffixes: B rows (sequences), Hq query heads, H kv heads, G = Hq // H, Q query
tokens per row, D head_dim, T block_size, S slots of the arena, N blocks of the table.
"""

from specoffload_kernels.accuracy import ACCURACY
from specoffload_kernels.dispatch import (
    append,
    backend,
    block_mass,
    describe,
    merge,
    operation_paths,
    paged_attention,
)
from specoffload_kernels.native.build import NativeUnavailableError
from specoffload_kernels.part import AttentionPart
from specoffload_kernels.selection import available_backends, forced_backend

__all__ = [
    "ACCURACY",
    "AttentionPart",
    "NativeUnavailableError",
    "append",
    "available_backends",
    "backend",
    "block_mass",
    "describe",
    "forced_backend",
    "merge",
    "operation_paths",
    "paged_attention",
]
