"""Attention over paged KV and its by-products; knows nothing of models, tiers or moves.

Legend of the shape suffixes: B rows (sequences), Hq query heads, H kv heads, G = Hq // H, Q query
tokens per row, D head_dim, T block_size, S slots of the arena, N blocks of the table.
"""

from specoffload_kernels.accuracy import ACCURACY
from specoffload_kernels.copying import copy_blocks
from specoffload_kernels.digests import DigestRule, Digests, DigestScore, digest_bytes
from specoffload_kernels.dispatch import (
    append,
    block_mass,
    digest,
    digest_score,
    merge,
    paged_attention,
)
from specoffload_kernels.native.build import NativeUnavailableError
from specoffload_kernels.part import AttentionPart
from specoffload_kernels.paths import backend, describe, operation_paths
from specoffload_kernels.selection import available_backends, forced_backend

__all__ = [
    "ACCURACY",
    "AttentionPart",
    "DigestRule",
    "DigestScore",
    "Digests",
    "NativeUnavailableError",
    "append",
    "available_backends",
    "backend",
    "block_mass",
    "copy_blocks",
    "describe",
    "digest",
    "digest_bytes",
    "digest_score",
    "forced_backend",
    "merge",
    "operation_paths",
    "paged_attention",
]
