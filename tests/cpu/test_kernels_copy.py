"""Blocks copied between arenas: those asked for, whole, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specoffload_kernels as kernels

BACKENDS = kernels.available_backends()


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_equals_a_copy_of_each_block(backend: str, data: st.DataObject) -> None:
    num_to, num_from, num_bytes = (data.draw(st.integers(1, 9)) for _ in range(3))
    gap = data.draw(st.integers(0, 3))
    count = data.draw(st.integers(0, num_to))
    to_slots = data.draw(st.permutations(range(num_to)))[:count]
    from_slots = [data.draw(st.integers(0, num_from - 1)) for _ in range(count)]
    generator = np.random.default_rng(0)
    source = generator.integers(0, 256, (num_from, num_bytes + gap), np.uint8)
    target = generator.integers(0, 256, (num_to, num_bytes + gap), np.uint8)
    expected = target.copy()
    for to, from_ in zip(to_slots, from_slots, strict=True):
        expected[to, :num_bytes] = source[from_, :num_bytes]
    with kernels.forced_backend(backend):
        kernels.copy_blocks(
            target[:, :num_bytes],
            np.array(to_slots, np.int32),
            source[:, :num_bytes],
            np.array(from_slots, np.int32),
        )
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("to", "from_"), [(-1, 0), (3, 0), (0, -1), (0, 2)])
def test_a_slot_outside_its_arena_is_refused(backend: str, to: int, from_: int) -> None:
    target, source = np.zeros((3, 8), np.uint8), np.ones((2, 8), np.uint8)
    slots = np.array([0, to], np.int32), np.array([0, from_], np.int32)
    with kernels.forced_backend(backend), pytest.raises(IndexError, match="arena"):
        kernels.copy_blocks(target, slots[0], source, slots[1])
    assert not target.any()


def test_what_does_not_fit_is_refused() -> None:
    target, source = np.zeros((3, 8), np.uint8), np.ones((2, 9), np.uint8)
    slots = np.array([0], np.int32)
    with pytest.raises(ValueError, match="fit"):
        kernels.copy_blocks(target, slots, source, slots)
    with pytest.raises(ValueError, match="int32"):
        kernels.copy_blocks(target, slots.astype(np.int64), target, slots)
