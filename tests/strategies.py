"""Hypothesis strategies shared by all tests. Knows no torch: what is drawn is a description."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

FAMILIES = ("llama", "qwen3", "mistral", "gemma3", "gpt_oss", "phi3", "glm4")
DRAFTS = ("perfect", "noisy", "poor", "stranger")
VOCAB_SIZE = 259
FIRST_WORD = 3
"""Smallest id of an ordinary token; those below are pad, begin and end."""


def load_profile() -> None:
    """Register the profiles and load the one that HYPOTHESIS_PROFILE names: dev, ci or night."""
    slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("dev", max_examples=50, **slow)
    settings.register_profile("ci", max_examples=200, derandomize=True, print_blob=True, **slow)
    settings.register_profile("night", max_examples=5000, print_blob=True, **slow)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `generate` by one runner.

    Attributes:
        family: of the target.
        draft: kind of the draft.
        weights: seed of both models' weights.
        block_size: tokens of a block.
        num_draft_tokens: gamma.
        choices: what "auto" chooses, over and over: timing it would make every run another one.
        prefill_chunk: most prompt tokens of one pass.
        device: device budget. None: no limit; otherwise the minimum plus this fraction of what
            all blocks of the call take.
        host: host budget. "none" is 0, "small" some of the blocks, "auto" as many as wanted.
        disk: whether there is a disk tier.
        lengths: tokens of each row's prompt.
        text: seed of the prompts.
        max_new_tokens: for each row.
    """

    family: str
    draft: str
    weights: int
    block_size: int
    num_draft_tokens: int | Literal["auto"]
    choices: tuple[int, ...] = (1, 0, 0, 4)
    prefill_chunk: int
    device: float | None
    host: Literal["none", "small", "auto"]
    disk: bool
    lengths: tuple[int, ...]
    text: int
    max_new_tokens: int


block_sizes = st.sampled_from([4, 8, 4, 8, 16, 4, 8, 16, 32, 64])
gammas = st.sampled_from([*range(17), 3, 4, 5, 6, 8, "auto", "auto"])
choices = st.lists(st.sampled_from([0, 0, *range(17)]), min_size=1, max_size=12).map(tuple)
prefill_chunks = st.one_of(st.integers(3, 16), st.integers(3, 512))
prompt_lengths = st.one_of(st.integers(1, 80), st.integers(40, 80), st.sampled_from([1, 4, 16, 64]))
new_tokens = st.one_of(st.integers(12, 24), st.integers(8, 40), st.integers(1, 40))
seeds = st.integers(0, 2**16)
device_fractions = st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.03, 0.1, 0.25, 0.5, 1.25, None])
"""Above the minimum; most bugs of a pool live at 0, where blocks are on the move all the time."""


@st.composite
def tiers(draw: Any) -> tuple[float | None, str, bool]:
    """Draw device, host and disk budgets that can hold the call between them."""
    device = draw(device_fractions)
    below = [("auto", False), ("auto", True), ("none", True), ("small", True)]
    if device is None:
        below.append(("none", False))
    host, disk = draw(st.sampled_from(below))
    return device, host, disk


@st.composite
def cases(draw: Any) -> Case:
    """Draw a call: any family, draft, budgets, block size, gamma and ragged batch."""
    device, host, disk = draw(tiers())
    num_rows = draw(st.sampled_from([1, 2, 1, 3]))
    return Case(
        family=draw(st.sampled_from(FAMILIES)),
        draft=draw(st.sampled_from([*DRAFTS, "noisy", "noisy"])),
        weights=draw(st.integers(0, 1)),
        block_size=draw(block_sizes),
        num_draft_tokens=draw(gammas),
        choices=draw(choices),
        prefill_chunk=draw(prefill_chunks),
        device=device,
        host=host,  # type: ignore[arg-type]
        disk=disk,
        lengths=tuple(draw(prompt_lengths) for _ in range(num_rows)),
        text=draw(seeds),
        max_new_tokens=draw(new_tokens),
    )
