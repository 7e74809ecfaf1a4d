"""What digests promise: bounds that hold, ranks that get better with bits, nothing from nowhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import arena_of_keys

import specoffload_kernels as kernels
from specoffload_kernels import DigestRule

HEADS, GROUPS, NUM_Q = 2, 2, 3


def true_block_lse(
    q: torch.Tensor, arena: torch.Tensor, slots: torch.Tensor, kv_len: int, **options: object
) -> torch.Tensor:
    """Sum over the keys themselves; all values are 0, so that only keys can be wrong."""
    arena = torch.stack([arena[:, 0], torch.zeros_like(arena[:, 0])], 1)
    start, end = torch.tensor([kv_len - q.shape[2]]), torch.tensor([kv_len])
    table = slots[None].int()
    part = kernels.paged_attention(q, arena, table, start, end, **options)  # type: ignore[arg-type]
    assert part.block_lse_BHQN is not None
    return part.block_lse_BHQN


def queries(dtype: torch.dtype, head_dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, HEADS * GROUPS, NUM_Q, head_dim), generator=generator).to(dtype)


def score(
    q: torch.Tensor,
    digests: kernels.Digests,
    kv_len: int,
    rule: DigestRule = DigestRule.SHADOW,
    **options: object,
) -> kernels.DigestScore:
    table = torch.arange(digests.num_tokens_N.shape[0], dtype=torch.int32)[None]
    start, end = torch.tensor([kv_len - q.shape[2]]), torch.tensor([kv_len])
    return kernels.digest_score(q, digests, table, start, end, rule=rule, **options)  # type: ignore[arg-type]


@given(
    rule=st.sampled_from([DigestRule.SHADOW, DigestRule.BOX]),
    bits=st.integers(0, 8),
    block_size=st.sampled_from([1, 3, 8, 16]),
    head_dim=st.sampled_from([4, 12, 33]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    window=st.none() | st.integers(1, 60),
    softcap=st.sampled_from([None, 5.0]),
    last=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_a_block_never_exceeds_its_bound(
    rule: DigestRule,
    bits: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    size: float,
    window: int | None,
    softcap: float | None,
    last: float,
    seed: int,
) -> None:
    num_tokens = [block_size, block_size, block_size, max(1, round(last * block_size))]
    arena, slots = arena_of_keys(
        num_tokens, heads=HEADS, block_size=block_size, head_dim=head_dim, dtype=dtype, seed=seed
    )
    arena = arena * size
    q = queries(dtype, head_dim, seed)
    options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    kv_len = max(NUM_Q, sum(num_tokens))
    digests = kernels.digest(arena, slots, torch.tensor(num_tokens), bits=bits)
    bound = score(q, digests, kv_len, rule, **options).upper_BHQN
    truth = true_block_lse(q, arena, slots, kv_len, **options)
    assert bound is not None
    # Logits are rounded on both sides, the larger they are the more.
    rounding = kernels.ACCURACY[torch.float32] * max(1.0, 10 * size)
    assert (bound >= truth - rounding).all()
    assert torch.equal(bound.isneginf(), truth.isneginf())


@pytest.mark.parametrize("block_size", [16, 64])
def test_more_bits_bound_tighter_and_estimate_better(block_size: int) -> None:
    head_dim, num_blocks = 64, 32
    num_tokens = [block_size] * num_blocks
    arena, slots = arena_of_keys(
        num_tokens, heads=HEADS, block_size=block_size, head_dim=head_dim, dtype=torch.float32
    )
    arena = arena * 4
    q = queries(torch.float32, head_dim, 0)
    kv_len = num_blocks * block_size
    truth = true_block_lse(q, arena, slots, kv_len, scale=head_dim**-0.5)
    errors, slacks, masses = [], [], []
    for bits in (0, 2, 3, 4, 8):
        digests = kernels.digest(arena, slots, torch.tensor(num_tokens), bits=bits)
        got = score(q, digests, kv_len, scale=head_dim**-0.5)
        assert got.upper_BHQN is not None
        errors.append((got.estimate_BHQN - truth).abs().mean().item())
        slacks.append((got.upper_BHQN - truth).mean().item())
        masses.append(mass_of_best(got.estimate_BHQN, truth))
    assert errors == sorted(errors, reverse=True)
    assert slacks == sorted(slacks, reverse=True)
    assert masses == sorted(masses)
    assert masses[3] > 0.99 * mass_of_best(truth, truth)


def mass_of_best(ranked_by: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the share of the softmax that a quarter of the blocks hold, chosen by a score."""
    best = ranked_by.topk(ranked_by.shape[-1] // 4, -1).indices
    return truth.softmax(-1).gather(-1, best).sum(-1).mean().item()


def test_mean_is_exact_where_all_keys_of_a_block_agree() -> None:
    num_tokens = [8, 8, 5]
    arena, slots = arena_of_keys(
        num_tokens, heads=HEADS, block_size=8, head_dim=12, dtype=torch.float32
    )
    arena[:, :, :, 1:] = arena[:, :, :, :1]
    digests = kernels.digest(arena, slots, torch.tensor(num_tokens), bits=0)
    truth = true_block_lse(queries(torch.float32, 12, 0), arena, slots, 21, scale=0.3)
    for rule in DigestRule:
        got = score(queries(torch.float32, 12, 0), digests, 21, rule, scale=0.3)
        torch.testing.assert_close(
            got.estimate_BHQN, truth, rtol=0, atol=kernels.ACCURACY[torch.float32]
        )
        assert (got.upper_BHQN is None) == (rule is DigestRule.MEAN)


@pytest.mark.parametrize("rule", DigestRule)
def test_many_blocks_are_scored_as_few_are(rule: DigestRule) -> None:
    """The steps in which blocks are scored leave no trace."""
    num_tokens = [64] * 40
    arena, slots = arena_of_keys(
        num_tokens, heads=HEADS, block_size=64, head_dim=32, dtype=torch.float32
    )
    digests = kernels.digest(arena, slots, torch.tensor(num_tokens), bits=2)
    index = torch.arange(4000, dtype=torch.int32) % 40
    q = queries(torch.float32, 32, 0)[:, :, :1]
    ends = [torch.tensor([4000 * 64])]
    many = kernels.digest_score(q, digests, index[None], ends[0] - 1, ends[0], rule=rule, scale=0.2)
    few = kernels.digest_score(
        q, digests, index[None, :40], ends[0] - 1, ends[0], rule=rule, scale=0.2
    )
    for ours, theirs in (
        (many.estimate_BHQN, few.estimate_BHQN),
        (many.upper_BHQN, few.upper_BHQN),
    ):
        if ours is not None and theirs is not None:
            torch.testing.assert_close(
                ours, theirs.repeat(1, 1, 1, 100), rtol=0, atol=kernels.ACCURACY[torch.float32]
            )


def test_a_digest_forgets_tokens_that_came_later() -> None:
    arena, slots = arena_of_keys([8], heads=HEADS, block_size=8, head_dim=12, dtype=torch.float32)
    early = kernels.digest(arena, slots, torch.tensor([5]), bits=4)
    arena[:, :, :, 5:] = torch.nan
    alone = kernels.digest(arena, slots, torch.tensor([5]), bits=4)
    assert all(torch.equal(a, b) for a, b in zip(early.tensors, alone.tensors, strict=True))
    q = queries(torch.float32, 12, 0)
    got, expected = (score(q, early, kv_len, scale=0.3).estimate_BHQN for kv_len in (8, 5))
    torch.testing.assert_close(got[:, :, -1], expected[:, :, -1])


@pytest.mark.parametrize("bits", [0, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_tensors(bits: int, dtype: torch.dtype) -> None:
    arena, slots = arena_of_keys([16], heads=3, block_size=16, head_dim=20, dtype=dtype)
    digests = kernels.digest(arena, slots, torch.tensor([16]), bits=bits)
    assert kernels.digest_bytes(3, 16, 20, bits=bits, dtype=dtype) == sum(
        tensor.nbytes for tensor in digests.tensors
    )


def test_misfits_are_refused() -> None:
    arena, slots = arena_of_keys([8], heads=HEADS, block_size=8, head_dim=12, dtype=torch.float32)
    one = torch.tensor([8])
    with pytest.raises(ValueError, match="0 to 8"):
        kernels.digest(arena, slots, one, bits=9)
    with pytest.raises(ValueError, match="both must be"):
        kernels.digest(arena, slots[None], one)
    with pytest.raises(ValueError, match=r"must be \[S, 2, H, T, D\]"):
        kernels.digest(arena[:, 0], slots, one)
    with pytest.raises(IndexError):
        kernels.digest(arena, slots + 7, one)
    digests = kernels.digest(arena, slots, one)
    with pytest.raises(ValueError, match="D must be equal"):
        score(queries(torch.float32, 16, 0), digests, 8, scale=1.0)
    table = torch.tensor([[3]], dtype=torch.int32)
    with pytest.raises(IndexError):
        kernels.digest_score(queries(torch.float32, 12, 0), digests, table, one, one, scale=1.0)
