"""Every operation, once: its schema, its definition, its path on each device, its shapes.

Torch knows each as ``torch.ops.specoffload_kernels.<name>``, and so do ``torch.compile``, fake
tensors and ``torch.library.opcheck``. Schemas know tensors only: a part travels as its fields.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specoffload_kernels import fakes
from specoffload_kernels.append import cpu as append_cpu
from specoffload_kernels.append import reference as append_reference
from specoffload_kernels.append import scattered
from specoffload_kernels.block_mass import cpu as block_mass_cpu
from specoffload_kernels.block_mass import reference as block_mass_reference
from specoffload_kernels.digest import cpu as digest_cpu
from specoffload_kernels.digest import reference as digest_reference
from specoffload_kernels.digest_score import cpu as digest_score_cpu
from specoffload_kernels.digest_score import reference as digest_score_reference
from specoffload_kernels.digests import DigestRule, Digests, DigestScore
from specoffload_kernels.gather_blocks import cpu as gather_blocks_cpu
from specoffload_kernels.gather_blocks import reference as gather_blocks_reference
from specoffload_kernels.gpu import gpu_path
from specoffload_kernels.merge import cpu as merge_cpu
from specoffload_kernels.merge import elementwise
from specoffload_kernels.merge import reference as merge_reference
from specoffload_kernels.paged_attention import cpu as paged_attention_cpu
from specoffload_kernels.paged_attention import gathered
from specoffload_kernels.paged_attention import reference as paged_attention_reference
from specoffload_kernels.part import AttentionPart
from specoffload_kernels.scatter_blocks import cpu as scatter_blocks_cpu
from specoffload_kernels.scatter_blocks import reference as scatter_blocks_reference
from specoffload_kernels.selection import torch_is_forced

_Function = Callable[..., Any]
_Fields = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _unchanged(function: _Function) -> _Function:
    return function


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation and all that serves it.

    Schemas of what decoding calls all the time have no keyword-only arguments: torch takes as long
    to sort them as for all the rest of a call.

    Attributes:
        name: Of the operation, of its folder, and of the function in each of the folder's modules.
        schema: Arguments and results as torch writes them.
        reference: The definition, in float64.
        cpu: The path on the CPU.
        anywhere: The path in plain torch, for devices without one of their own.
        fake: What gives the results' shapes, in the terms of the schema.
        flat: Turns a function like ``cpu`` into one in the terms of the schema.
        is_native: Whether the native library has code for it.
    """

    name: str
    schema: str
    reference: _Function
    cpu: _Function
    anywhere: _Function
    fake: _Function
    flat: Callable[[_Function], _Function] = _unchanged
    is_native: bool = False

    @property
    def overload(self) -> _Function:
        """What torch calls it: takes and returns what the schema says."""
        overload: _Function = getattr(torch.ops.specoffload_kernels, self.name).default
        return overload

    def on_gpu(self, *args: object, **kwargs: object) -> object:
        """Run the Triton kernel, unless there is none or torch is forced."""
        kernel = None if torch_is_forced() else gpu_path(self.name).kernel
        return (kernel or self.anywhere)(*args, **kwargs)


def _flat_paged_attention(function: _Function) -> _Function:
    def paged_attention(
        q_BHQD: torch.Tensor,
        arena_S2HTD: torch.Tensor,
        table_BN: torch.Tensor,
        q_start_B: torch.Tensor,
        kv_len_B: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        with_block_lse: bool = True,
    ) -> _Fields:
        part: AttentionPart = function(
            q_BHQD,
            arena_S2HTD,
            table_BN,
            q_start_B,
            kv_len_B,
            scale=scale,
            window=window,
            softcap=softcap,
            with_block_lse=with_block_lse,
        )
        return _fields(part)

    return paged_attention


def _flat_merge(function: _Function) -> _Function:
    def merge(
        outs: list[torch.Tensor],
        lses: list[torch.Tensor],
        block_lses: list[torch.Tensor],
        sinks_H: torch.Tensor | None = None,
    ) -> _Fields:
        parts = [
            AttentionPart(out_BQHD=out_BQHD, lse_BHQ=lse_BHQ, block_lse_BHQN=block_lse_BHQN)
            for out_BQHD, lse_BHQ, block_lse_BHQN in zip(
                outs, lses, block_lses or itertools.repeat(None), strict=False
            )
        ]
        return _fields(function(parts, sinks_H=sinks_H))

    return merge


def _flat_digest(function: _Function) -> _Function:
    def digest(*args: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
        digests: Digests = function(*args, bits=bits)
        return digests.tensors

    return digest


def _flat_digest_score(function: _Function) -> _Function:
    def digest_score(
        q_BHQD: torch.Tensor, *args: torch.Tensor, rule: str, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        *fields, table_BN, q_start_B, kv_len_B = args
        score: DigestScore = function(
            q_BHQD,
            Digests.of(fields),
            table_BN,
            q_start_B,
            kv_len_B,
            rule=DigestRule(rule),
            **options,
        )
        # The estimate of a box is its bound, and torch wants results that share no memory.
        upper_BHQN = score.upper_BHQN if rule == DigestRule.SHADOW.value else None
        return score.estimate_BHQN, upper_BHQN

    return digest_score


def _fields(part: AttentionPart) -> _Fields:
    return part.out_BQHD, part.lse_BHQ, part.block_lse_BHQN


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            name="paged_attention",
            schema="(Tensor q_BHQD, Tensor arena_S2HTD, Tensor table_BN, Tensor q_start_B, "
            "Tensor kv_len_B, float scale, int? window=None, float? softcap=None, "
            "bool with_block_lse=True) -> (Tensor, Tensor, Tensor?)",
            reference=paged_attention_reference.paged_attention,
            cpu=paged_attention_cpu.paged_attention,
            anywhere=gathered.attend,
            fake=fakes.paged_attention,
            flat=_flat_paged_attention,
            is_native=True,
        ),
        Operation(
            name="append",
            schema="(Tensor(a!) arena_S2HTD, Tensor k_BHQD, Tensor v_BHQD, Tensor slots_BQ, "
            "Tensor offsets_BQ) -> ()",
            reference=append_reference.append,
            cpu=append_cpu.append,
            anywhere=scattered.append,
            fake=fakes.append,
            is_native=True,
        ),
        Operation(
            name="merge",
            schema="(Tensor[] outs, Tensor[] lses, Tensor[] block_lses, Tensor? sinks_H=None) "
            "-> (Tensor, Tensor, Tensor?)",
            reference=merge_reference.merge,
            cpu=merge_cpu.merge,
            anywhere=elementwise.merge,
            fake=fakes.merge,
            flat=_flat_merge,
            is_native=True,
        ),
        Operation(
            name="block_mass",
            schema="(Tensor block_lse, Tensor lse, int num_kv_heads, Tensor num_rows) -> Tensor",
            reference=block_mass_reference.block_mass,
            cpu=block_mass_cpu.block_mass,
            anywhere=block_mass_cpu.block_mass,
            fake=fakes.block_mass,
        ),
        Operation(
            name="digest",
            schema="(Tensor arena_S2HTD, Tensor slots_N, Tensor num_tokens_N, *, int bits) "
            "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
            reference=digest_reference.digest,
            cpu=digest_cpu.digest,
            anywhere=digest_cpu.digest,
            fake=fakes.digest,
            flat=_flat_digest,
        ),
        Operation(
            name="digest_score",
            schema="(Tensor q_BHQD, Tensor mean_NHD, Tensor low_NHD, Tensor high_NHD, "
            "Tensor codes_NHWTP, Tensor residual_NHT, Tensor num_tokens_N, Tensor table_BN, "
            "Tensor q_start_B, Tensor kv_len_B, *, str rule, float scale, int? window=None, "
            "float? softcap=None) -> (Tensor, Tensor?)",
            reference=digest_score_reference.digest_score,
            cpu=digest_score_cpu.digest_score,
            anywhere=digest_score_cpu.digest_score,
            fake=fakes.digest_score,
            flat=_flat_digest_score,
        ),
        Operation(
            name="gather_blocks",
            schema="(Tensor arena, Tensor slots_n, Tensor(a!) run) -> ()",
            reference=gather_blocks_reference.gather_blocks,
            cpu=gather_blocks_cpu.gather_blocks,
            anywhere=gather_blocks_cpu.gather_blocks,
            fake=fakes.gather_blocks,
        ),
        Operation(
            name="scatter_blocks",
            schema="(Tensor(a!) arena, Tensor slots_n, Tensor run) -> ()",
            reference=scatter_blocks_reference.scatter_blocks,
            cpu=scatter_blocks_cpu.scatter_blocks,
            anywhere=scatter_blocks_cpu.scatter_blocks,
            fake=fakes.scatter_blocks,
        ),
    )
}
"""All operations, by name."""


def _register() -> torch.library.Library:
    library = torch.library.Library("specoffload_kernels", "DEF")
    for name, operation in OPERATIONS.items():
        library.define(name + operation.schema)
        library.impl(name, operation.flat(operation.cpu), "CPU")
        library.impl(name, operation.flat(operation.on_gpu), "CUDA")
        library.impl(name, operation.flat(operation.anywhere), "CompositeExplicitAutograd")
        torch.library.register_fake(f"specoffload_kernels::{name}", operation.fake, lib=library)
    return library


_LIBRARY = _register()  # the registrations last as long as this
