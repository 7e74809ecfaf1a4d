"""Paged attention's Triton kernels, interpreted, against the float64 definition."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from attention_shapes import SHAPES, SIXTEEN_BITS
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Shape, within_larger_tensors
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import interpreter_builder

import specoffload_kernels as kernels
from specoffload_kernels.paged_attention import reference
from specoffload_kernels.paged_attention.triton import paged_attention

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def assert_close(
    got: kernels.AttentionPart, expected: kernels.AttentionPart, tolerance: float
) -> None:
    assert got.out_BQHD.dtype == torch.float32
    assert got.out_BQHD.is_contiguous()
    pairs = [(got.out_BQHD, expected.out_BQHD), (got.lse_BHQ, expected.lse_BHQ)]
    if got.block_lse_BHQN is not None:
        assert expected.block_lse_BHQN is not None
        pairs.append((got.block_lse_BHQN, expected.block_lse_BHQN))
    for value, truth in pairs:
        torch.testing.assert_close(value, truth.float(), rtol=0, atol=tolerance)


def assert_equals_definition(shape: Shape, seed: int = 0, with_block_lse: bool = True) -> None:
    arguments = shape.arguments(seed)
    got = paged_attention(**arguments, with_block_lse=with_block_lse)
    assert (got.block_lse_BHQN is not None) == with_block_lse
    assert_close(got, reference.paged_attention(**arguments), kernels.ACCURACY[shape.dtype])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_definition(shape: Shape) -> None:
    assert_equals_definition(shape)


@pytest.mark.parametrize("name", ["one query", "odd blocks", "large blocks", "70 queries"])
def test_equals_definition_without_sums(name: str) -> None:
    assert_equals_definition(SHAPES[name], with_block_lse=False)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_equals_definition_in_16_bits(name: str, dtype: torch.dtype) -> None:
    assert_equals_definition(dataclasses.replace(SHAPES[name], dtype=dtype))


@settings(max_examples=20)
@given(
    shape=st.builds(
        Shape,
        heads=st.integers(1, 2),
        groups=st.sampled_from([1, 2, 3, 4, 7, 11]),
        head_dim=st.sampled_from([8, 16, 40, 64, 80]),
        block_size=st.sampled_from([1, 3, 4, 8, 16, 64, 100]),
        num_q=st.integers(1, 20),
        lengths=st.lists(st.integers(0, 100), min_size=1, max_size=2).map(tuple),
        window=st.none() | st.integers(1, 110),
        softcap=st.sampled_from([None, 5.0]),
        dtype=st.sampled_from([F32, F32, BF16, F16]),
    ),
    hole=st.integers(0, 40),
    seed=st.integers(0, 3),
    with_block_lse=st.booleans(),
)
def test_equals_definition_on_any_shape(
    shape: Shape, hole: int, seed: int, with_block_lse: bool
) -> None:
    num_blocks = max(1, -(-max(shape.lengths) // shape.block_size))
    if hole < num_blocks:
        shape = dataclasses.replace(shape, absent=((0, hole),))
    assert_equals_definition(shape, seed, with_block_lse)


def test_mixed_types_are_multiplied_in_float32() -> None:
    arguments = Shape(dtype=BF16, lengths=(70,)).arguments()
    arguments["q_BHQD"] = arguments["q_BHQD"].float() * (1 + 2**-12)
    got = paged_attention(**arguments)
    expected = reference.paged_attention(**arguments)
    # The probabilities are rounded to the arena's type, the logits are not.
    torch.testing.assert_close(got.lse_BHQ, expected.lse_BHQ.float(), rtol=0, atol=2e-6)
    assert_close(got, expected, kernels.ACCURACY[BF16])


def test_sums_stay_exact_for_blocks_of_vanishing_mass() -> None:
    arguments = Shape(num_q=1, lengths=(64,), head_dim=8).arguments()
    arguments["q_BHQD"] = torch.full_like(arguments["q_BHQD"], 50.0)
    arena = arguments["arena_S2HTD"]
    level = torch.linspace(-1.0, 1.0, arena.shape[0])[:, None, None, None]
    arena[:, 0] = level * ~arena[:, 0].isnan()
    # Logits reach 140 here, and their rounding grows with them.
    assert_close(
        paged_attention(**arguments),
        reference.paged_attention(**arguments),
        140 * kernels.ACCURACY[F32],
    )


def test_views_of_larger_tensors() -> None:
    arguments = Shape().arguments()
    expected = reference.paged_attention(**arguments)
    got = paged_attention(**within_larger_tensors(arguments))
    assert_close(got, expected, kernels.ACCURACY[F32])


def test_table_shorter_than_the_sequence() -> None:
    arguments = Shape(lengths=(200,)).arguments()
    arguments["table_BN"] = arguments["table_BN"][:, :10].contiguous()
    assert_close(
        paged_attention(**arguments),
        reference.paged_attention(**arguments),
        kernels.ACCURACY[F32],
    )


def test_empty_table() -> None:
    arguments = Shape().arguments()
    arguments["table_BN"] = arguments["table_BN"][:, :0]
    got = paged_attention(**arguments)
    assert got.out_BQHD.eq(0).all()
    assert got.lse_BHQ.isneginf().all()
    assert got.block_lse_BHQN is not None
    assert got.block_lse_BHQN.shape[-1] == 0


def test_unknown_slot_stops_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # A compiled kernel asserts because it is declared with debug=True; the interpreter is told.
    options = dataclasses.replace(interpreter_builder.options, debug=True, sanitize_overflow=False)
    monkeypatch.setattr(interpreter_builder, "options", options)
    arguments = Shape().arguments()
    paged_attention(**arguments)
    arguments["table_BN"][1, 2] = 1_000_000
    with pytest.raises(InterpreterError, match="a slot that the arena lacks"):
        paged_attention(**arguments)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(head_dim=264, num_q=1, lengths=(20,)), "head_dim 264 is above 256"),
        (Shape(dtype=torch.float64, lengths=(20,)), "torch.float64 is none of"),
    ],
    ids=["wide heads", "float64"],
)
def test_what_the_kernels_do_not_serve_goes_to_torch(
    shape: Shape, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = shape.arguments()
    with caplog.at_level(logging.WARNING):
        got = paged_attention(**arguments)
    assert_close(got, reference.paged_attention(**arguments), kernels.ACCURACY[F32])
    assert reason in caplog.text


def test_tokens_that_are_not_contiguous_go_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    arguments = Shape(lengths=(20,)).arguments()
    expected = reference.paged_attention(**arguments)
    arguments["arena_S2HTD"] = arguments["arena_S2HTD"].transpose(3, 4).contiguous()
    arguments["arena_S2HTD"] = arguments["arena_S2HTD"].transpose(3, 4)
    with caplog.at_level(logging.WARNING):
        got = paged_attention(**arguments)
    assert_close(got, expected, kernels.ACCURACY[F32])
    assert "not contiguous" in caplog.text
