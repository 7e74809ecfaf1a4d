"""Paged attention and merging on the GPU, at sizes that are used, against the definition."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_shapes import SHAPES, SIXTEEN_BITS
from kernel_cases import Shape
from torch.utils import _pytree as pytree

import specoffload_kernels as kernels
from specoffload_kernels.paged_attention import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU"),
]

LARGE = {
    "8B decode, 32K": Shape(
        heads=8, groups=4, head_dim=128, block_size=64, num_q=1, lengths=(32768,)
    ),
    "8B verify, ragged": Shape(
        heads=8, groups=4, head_dim=128, block_size=64, num_q=6, lengths=(8191, 5000, 6)
    ),
    "8B prefill chunk": Shape(
        heads=8, groups=4, head_dim=128, block_size=64, num_q=512, lengths=(2048,)
    ),
    "wide heads, small blocks": Shape(
        heads=2, groups=8, head_dim=256, block_size=16, num_q=100, lengths=(1000,), softcap=50.0
    ),
}


def to_gpu(values: object) -> object:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), values)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(dataclasses.replace(shape, dtype=dtype), id=f"{name}, {dtype}")
        for name, shape in {**SHAPES, **LARGE}.items()
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        if dtype == torch.float32 or name in (*SIXTEEN_BITS, *LARGE)
    ],
)
def test_attention_equals_the_definition(shape: Shape) -> None:
    arguments = shape.arguments()
    got = kernels.paged_attention(**to_gpu(arguments))
    expected = reference.paged_attention(**arguments)
    # The rounding of capped logits grows with the cap.
    tolerance = kernels.ACCURACY[shape.dtype] * max(1.0, shape.softcap or 0.0)
    for name, truth in vars(expected).items():
        value = getattr(got, name).cpu()
        torch.testing.assert_close(value, truth.float(), rtol=0, atol=tolerance)


def test_lengths_may_lie_on_the_cpu() -> None:
    arguments = Shape().arguments()
    on_gpu = dict(to_gpu(arguments))
    on_gpu["q_start_B"], on_gpu["kv_len_B"] = arguments["q_start_B"], arguments["kv_len_B"]
    got = kernels.paged_attention(**on_gpu)
    same = kernels.paged_attention(**to_gpu(arguments))
    assert torch.equal(got.out_BQHD, same.out_BQHD)


def test_parts_merge_to_the_whole() -> None:
    arguments = LARGE["8B verify, ragged"].arguments()
    whole = reference.paged_attention(**arguments)
    table = arguments["table_BN"]
    owner = torch.arange(table.shape[1]) % 3
    parts = [
        kernels.paged_attention(
            **to_gpu({**arguments, "table_BN": table.masked_fill(owner != index, -1)})
        )
        for index in range(3)
    ]
    merged = kernels.merge(parts)
    for name, truth in vars(whole).items():
        value = getattr(merged, name).cpu()
        torch.testing.assert_close(
            value, truth.float(), rtol=0, atol=kernels.ACCURACY[torch.float32]
        )
