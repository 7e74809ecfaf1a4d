"""Every path of paged attention against the float64 definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import Shape, within_larger_tensors

import specoffload_kernels as kernels
from specoffload_kernels.paged_attention import reference

BACKENDS = kernels.available_backends()


def assert_close(
    got: kernels.AttentionPart, expected: kernels.AttentionPart, tolerance: float
) -> None:
    assert got.out_BQHD.dtype == torch.float32
    assert got.out_BQHD.is_contiguous()
    pairs = [(got.out_BQHD, expected.out_BQHD), (got.lse_BHQ, expected.lse_BHQ)]
    if got.block_lse_BHQN is not None:
        pairs.append((got.block_lse_BHQN, expected.block_lse_BHQN))
    for value, truth in pairs:
        torch.testing.assert_close(value, truth.float(), rtol=0, atol=tolerance)


SHAPES = {
    "plain": Shape(),
    "one query": Shape(num_q=1),
    "multi-head": Shape(heads=3, groups=1, num_q=1),
    "group of 4, D 128": Shape(groups=4, head_dim=128, block_size=64),
    "group of 7, D 80": Shape(heads=1, groups=7, head_dim=80),
    "group of 9, D 256": Shape(heads=1, groups=9, head_dim=256),
    "D 8": Shape(head_dim=8, block_size=4),
    "D 16": Shape(head_dim=16, block_size=4),
    "D 20": Shape(head_dim=20),
    "D 6": Shape(head_dim=6),
    "D 24": Shape(head_dim=24, num_q=17),
    "D 96": Shape(head_dim=96, num_q=3),
    "odd blocks": Shape(block_size=7, lengths=(50, 49, 7)),
    "blocks of 1": Shape(block_size=1, lengths=(12, 5, 9)),
    "large blocks": Shape(block_size=256, lengths=(300, 256, 257), num_q=3),
    "17 queries": Shape(num_q=17, lengths=(130, 77, 17)),
    "70 queries": Shape(num_q=70, lengths=(130, 77, 70)),
    "350 queries": Shape(num_q=350, heads=1, groups=3, head_dim=16, lengths=(500, 350)),
    "350 queries, window": Shape(
        num_q=350, heads=1, groups=3, head_dim=16, lengths=(500, 350), window=70
    ),
    "350 queries, absent": Shape(
        num_q=350, heads=1, groups=3, head_dim=16, lengths=(500, 350), absent=((0, 2), (1, 9))
    ),
    "long": Shape(heads=1, lengths=(3000,), block_size=64),
    "window": Shape(window=20),
    "window of 1": Shape(window=1),
    "window below the queries": Shape(window=9, num_q=17, lengths=(130, 77, 17)),
    "window over everything": Shape(window=1000),
    "softcap": Shape(softcap=2.0),
    "softcap and window": Shape(softcap=30.0, window=33, groups=4, head_dim=128),
    "absent blocks": Shape(absent=((0, 0), (0, 3), (1, 4), (2, 0))),
    "absent, window": Shape(absent=((0, 7), (1, 2)), window=20),
    "absent, 70 queries": Shape(
        absent=((0, 1), (0, 6), (1, 2)), num_q=70, lengths=(130, 77, 70), window=50
    ),
    "empty row": Shape(num_q=1, lengths=(0, 40)),
    "shorter than the queries": Shape(num_q=17, lengths=(130, 3)),
}


@pytest.mark.parametrize("with_block_lse", [True, False], ids=["sums", "no sums"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_definition(
    shape: Shape, backend: str, dtype: torch.dtype, with_block_lse: bool
) -> None:
    shape = Shape(**{**vars(shape), "dtype": dtype})
    arguments = shape.arguments()
    with kernels.forced_backend(backend):
        got = kernels.paged_attention(**arguments, with_block_lse=with_block_lse)
    assert (got.block_lse_BHQN is not None) == with_block_lse
    assert_close(got, reference.paged_attention(**arguments), kernels.ACCURACY[dtype])


@given(
    shape=st.builds(
        Shape,
        heads=st.integers(1, 3),
        groups=st.sampled_from([1, 2, 3, 4, 7, 11]),
        head_dim=st.sampled_from([4, 8, 12, 16, 32, 40, 64]),
        block_size=st.sampled_from([1, 3, 4, 8, 16, 64]),
        num_q=st.integers(1, 20),
        lengths=st.lists(st.integers(0, 150), min_size=1, max_size=3).map(tuple),
        window=st.none() | st.integers(1, 160),
        softcap=st.sampled_from([None, None, 5.0]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    ),
    hole=st.integers(0, 40),
    seed=st.integers(0, 3),
    with_block_lse=st.booleans(),
    backend=st.sampled_from(BACKENDS),
)
def test_equals_definition_on_any_shape(
    shape: Shape, hole: int, seed: int, with_block_lse: bool, backend: str
) -> None:
    num_blocks = max(1, -(-max(shape.lengths) // shape.block_size))
    if hole < num_blocks:
        shape = Shape(**{**vars(shape), "absent": ((0, hole),)})
    arguments = shape.arguments(seed)
    with kernels.forced_backend(backend):
        got = kernels.paged_attention(**arguments, with_block_lse=with_block_lse)
    assert_close(got, reference.paged_attention(**arguments), kernels.ACCURACY[shape.dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_summed_in_float32(backend: str) -> None:
    arguments = Shape(dtype=torch.bfloat16, lengths=(2000,), block_size=64).arguments()
    with kernels.forced_backend(backend):
        got = kernels.paged_attention(**arguments)
    assert_close(got, reference.paged_attention(**arguments), kernels.ACCURACY[torch.float32])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_q", [1, 70])
def test_float16_and_mixed_types_are_served(backend: str, num_q: int) -> None:
    half = Shape(dtype=torch.float16, num_q=num_q, lengths=(130, 77)).arguments()
    mixed = {**Shape(dtype=torch.bfloat16, num_q=num_q, lengths=(130, 77)).arguments()}
    mixed["q_BHQD"] = mixed["q_BHQD"].float()
    with kernels.forced_backend(backend):
        for arguments, dtype in ((half, torch.float16), (mixed, torch.bfloat16)):
            for with_block_lse in (True, False):
                got = kernels.paged_attention(**arguments, with_block_lse=with_block_lse)
                expected = reference.paged_attention(**arguments)
                assert_close(got, expected, kernels.ACCURACY[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_stay_exact_for_blocks_of_vanishing_mass(backend: str) -> None:
    arguments = Shape(num_q=1, lengths=(64,), head_dim=8).arguments()
    arguments["q_BHQD"] = torch.full_like(arguments["q_BHQD"], 50.0)
    arena = arguments["arena_S2HTD"]
    level = torch.linspace(-1.0, 1.0, arena.shape[0])[:, None, None, None]
    arena[:, 0] = level * ~arena[:, 0].isnan()
    with kernels.forced_backend(backend):
        got = kernels.paged_attention(**arguments)
    expected = reference.paged_attention(**arguments)
    # Logits reach 140 here, and their rounding grows with them.
    assert_close(got, expected, 140 * kernels.ACCURACY[torch.float32])


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_of_larger_tensors(backend: str) -> None:
    arguments = Shape().arguments()
    expected = reference.paged_attention(**arguments)
    with kernels.forced_backend(backend):
        got = kernels.paged_attention(**within_larger_tensors(arguments))
    assert_close(got, expected, kernels.ACCURACY[torch.float32])


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch"])
def test_result_depends_on_neither_threads_nor_neighbours(backend: str) -> None:
    arguments = Shape(lengths=(1000, 300), absent=((0, 3),)).arguments()
    alone = {
        name: value[:1] if name[-2:] != "TD" and isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    before = torch.get_num_threads()
    try:
        with kernels.forced_backend(backend):
            torch.set_num_threads(1)
            single = kernels.paged_attention(**arguments)
            torch.set_num_threads(3)
            several = kernels.paged_attention(**arguments)
            row = kernels.paged_attention(**alone)
    finally:
        torch.set_num_threads(before)
    for name in vars(single):
        assert torch.equal(getattr(single, name), getattr(several, name))
        assert torch.equal(getattr(single, name)[:1], getattr(row, name))


@pytest.mark.parametrize("backend", BACKENDS)
def test_table_shorter_than_the_sequence(backend: str) -> None:
    for num_q in (1, 70):
        arguments = Shape(lengths=(200,), num_q=num_q).arguments()
        arguments["table_BN"] = arguments["table_BN"][:, :10].contiguous()
        with kernels.forced_backend(backend):
            for with_block_lse in (True, False):
                got = kernels.paged_attention(**arguments, with_block_lse=with_block_lse)
                expected = reference.paged_attention(**arguments)
                assert_close(got, expected, kernels.ACCURACY[torch.float32])


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_table(backend: str) -> None:
    arguments = Shape().arguments()
    arguments["table_BN"] = arguments["table_BN"][:, :0]
    with kernels.forced_backend(backend):
        got = kernels.paged_attention(**arguments)
    assert got.out_BQHD.eq(0).all()
    assert got.lse_BHQ.isneginf().all()
    assert got.block_lse_BHQN is not None
    assert got.block_lse_BHQN.shape[-1] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_unknown_slot_is_refused(backend: str) -> None:
    arguments = Shape().arguments()
    arguments["table_BN"][1, 2] = 1_000_000
    with kernels.forced_backend(backend), pytest.raises(IndexError):
        kernels.paged_attention(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q_BHQD", torch.zeros(3, 6, 5, 32)),
        ("q_BHQD", torch.zeros(3, 5, 5, 64)),
        ("table_BN", torch.zeros(3, 9, dtype=torch.int64)),
        ("table_BN", torch.zeros(2, 9, dtype=torch.int32)),
        ("q_start_B", torch.zeros(3)),
        ("kv_len_B", torch.zeros(1, dtype=torch.int64)),
        ("window", 0),
    ],
)
def test_misfits_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        kernels.paged_attention(**{**Shape().arguments(), name: value})
