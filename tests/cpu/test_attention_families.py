"""Attention over the pool against transformers' eager attention: logits and block mass.

Tokens can be right by luck where logits are not, so here numbers are compared.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from strategies import FAMILIES
from transformers import PreTrainedModel
from vocabulary import (
    TOLERANCES,
    WINDOW,
    assert_near,
    draft_of,
    minimum_budget,
    pad_left,
    plain_generate,
    prompt,
    target_of,
    words,
)

from specoffload import SpecOffloadConfig, SpecOffloadRunner

TOLERANCE = TOLERANCES[torch.float32]
BLOCK_SIZE = 8


@functools.cache
def _eager(family: str) -> PreTrainedModel:
    model = copy.deepcopy(target_of(family))
    model.set_attn_implementation("eager")
    return model


@dataclass
class Tape:
    """What went into a model and what came out, one entry for each forward pass.

    Attributes:
        ids: `[batch, rows]`.
        logits: `[batch, last rows, vocabulary]`; None where the pass had none.
    """

    ids: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor | None] = field(default_factory=list)


@contextmanager
def _record(model: PreTrainedModel) -> Iterator[Tape]:
    tape = Tape()

    def into(module: Any, args: tuple[Any, ...], out: Any) -> None:
        tape.ids.append(args[0].clone())
        tape.logits.append(None)

    def out_of(module: Any, args: Any, out: torch.Tensor) -> None:
        tape.logits[-1] = out.clone()

    hooks = [
        model.get_input_embeddings().register_forward_hook(into),
        model.get_output_embeddings().register_forward_hook(out_of),
    ]
    try:
        yield tape
    finally:
        for hook in hooks:
            hook.remove()


def _options(folder: Path, **kwargs: Any) -> dict[str, Any]:
    return {
        "block_size": BLOCK_SIZE,
        "prefill_chunk": 24,
        "disk_path": folder,
        "host_budget": 0,
        "poison": True,
        **kwargs,
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gamma", [0, 5])
@pytest.mark.parametrize("budget", ["minimum", "unlimited"])
def test_logits_are_those_of_eager_attention(
    family: str, gamma: int, budget: str, tmp_path: Path
) -> None:
    target, draft = target_of(family), draft_of(family, "perfect")
    options = _options(tmp_path, num_draft_tokens=gamma)
    if budget == "minimum":
        options["device_budget"] = minimum_budget(draft, target, SpecOffloadConfig(**options))
    ids = prompt(3 * WINDOW + 3, seed=7)
    with (
        SpecOffloadRunner(draft, target, SpecOffloadConfig(**options)) as runner,
        _record(target) as tape,
    ):
        out = runner.generate(ids, max_new_tokens=24)
        report = runner.report()

    # A perfect draft is never rolled back: the passes follow each other without overlap, and what
    # was fed to them is one text.
    assert report.accepted_tokens == report.drafted_tokens
    fed = torch.cat(tape.ids, dim=1)
    assert fed.shape[1] >= out.shape[1] - 1
    common = min(fed.shape[1], out.shape[1])
    assert fed[:, :common].equal(out[:, :common])
    with torch.inference_mode():
        expected = _eager(family)(fed).logits[0]
    end = num_compared = 0
    for step, (entry, logits) in enumerate(zip(tape.ids, tape.logits, strict=True)):
        end += entry.shape[1]
        if logits is None:
            continue
        num = logits.shape[1]
        assert_near(
            logits[0],
            expected[end - num : end],
            atol=TOLERANCE.logits,
            what=f"logits of pass {step}, positions {end - num} to {end}",
        )
        num_compared += num
    assert num_compared >= 24, "hardly any logits were seen"


def _eager_mass(
    family: str, tokens: list[int], num_rows: int, block_size: int
) -> dict[int, np.ndarray]:
    """Return each layer's mass `[kv_head, block]`, averaged over the last `num_rows` queries.

    By the definition: probabilities over the visible keys (a sink takes no part, so what it took
    is given back to the keys), averaged over the query heads of a kv head's group and the query
    rows, summed over each block.
    """
    model = _eager(family)
    with torch.inference_mode():
        attentions = model(torch.tensor([tokens]), output_attentions=True).attentions
    kv_heads = model.config.num_key_value_heads
    n = len(tokens)
    num_blocks = -(-n // block_size)
    masses = {}
    for layer, p_1HQK in enumerate(attentions):
        p_HRK = p_1HQK[0, :, n - num_rows :].double()
        assert p_HRK.shape[1:] == (num_rows, n)
        p_HRK = p_HRK / p_HRK.sum(dim=-1, keepdim=True)
        p_GK = p_HRK.unflatten(0, (kv_heads, -1)).mean(dim=(1, 2))
        padded = torch.nn.functional.pad(p_GK, (0, num_blocks * block_size - n))
        masses[layer] = padded.unflatten(1, (num_blocks, block_size)).sum(-1).numpy()
    return masses


def _assert_mass(
    runner: SpecOffloadRunner, family: str, rows: list[list[int]], out: torch.Tensor, width: int
) -> None:
    signal = runner.last_signal()
    assert signal is not None
    config = target_of(family).config
    mass = np.asarray(signal.mass)
    shape = (len(signal.rows), config.num_hidden_layers, config.num_key_value_heads)
    assert mass.shape[:3] == shape
    for i, of in enumerate(signal.rows.tolist()):
        row = rows[of]
        num_tokens, num_rows = int(signal.num_tokens[i]), int(signal.num_rows[i])
        tokens = [*row, *out[of, width:].tolist()]
        assert len(row) < num_tokens <= len(tokens)
        assert num_rows >= 1
        expected = _eager_mass(family, tokens[:num_tokens], num_rows, BLOCK_SIZE)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        assert_near(
            np.nan_to_num(mass[i, ..., num_blocks:]),
            np.zeros_like(mass[i, ..., num_blocks:]),
            atol=0.0,
            what="mass of blocks that do not exist",
        )
        for layer, want in expected.items():
            got = mass[i, layer, :, :num_blocks]
            where = f"row {of}, layer {layer}"
            assert (got >= 0).all(), where
            assert_near(got, want, atol=TOLERANCE.mass, what=f"mass, {where}")
            ones = np.ones(config.num_key_value_heads)
            assert_near(got.sum(-1), ones, atol=TOLERANCE.mass, what=f"sum of mass, {where}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["perfect", "noisy"])
@pytest.mark.parametrize("budget", ["minimum", "unlimited"])
def test_block_mass_is_that_of_eager_attention(
    family: str, kind: str, budget: str, tmp_path: Path
) -> None:
    target, draft = target_of(family), draft_of(family, kind)
    options = _options(tmp_path, num_draft_tokens=5)
    if budget == "minimum":
        options["device_budget"] = minimum_budget(draft, target, SpecOffloadConfig(**options))
    row = words(45, seed=11)
    num_rows = set()
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(**options)) as runner:
        for num_new in (2, 11, 20, 23, 26):
            out = runner.generate(torch.tensor([row]), max_new_tokens=num_new)
            _assert_mass(runner, family, [row], out, len(row))
            signal = runner.last_signal()
            assert signal is not None
            num_rows.add(int(signal.num_rows[0]))
    assert max(num_rows) > 1, "every verify had a single row"


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_block_mass_of_a_padded_batch_is_that_of_each_row(family: str, tmp_path: Path) -> None:
    """A row's blocks begin at its own first token: padding is in nobody's block."""
    target, draft = target_of(family), draft_of(family, "perfect")
    rows = [words(n, seed=n) for n in (3, 45, 16)]
    ids, mask = pad_left(rows)
    options = SpecOffloadConfig(**_options(tmp_path, num_draft_tokens=3))
    with SpecOffloadRunner(draft, target, options) as runner:
        out = runner.generate(ids, mask, max_new_tokens=13)
        _assert_mass(runner, family, rows, out, ids.shape[1])
        signal = runner.last_signal()
    assert signal is not None
    assert signal.rows.tolist() == [0, 1, 2]


def test_rows_that_are_run_in_groups_keep_their_numbers(tmp_path: Path) -> None:
    target, draft = target_of("llama"), draft_of("llama", "perfect")
    options = _options(tmp_path, num_draft_tokens=3)
    options["device_budget"] = minimum_budget(draft, target, SpecOffloadConfig(**options))
    rows = [words(n, seed=n) for n in (33, 45, 60)]
    ids, mask = pad_left(rows)
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(**options)) as runner:
        out = runner.generate(ids, mask, max_new_tokens=13)
        signal, report = runner.last_signal(), runner.report()
        assert signal is not None
        assert signal.rows.tolist() == [2], "the last verify is that of the last row"
        assert {share.row for share in report.focus} == {2}
        _assert_mass(runner, "llama", rows, out, ids.shape[1])


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_blocks_out_of_the_window_have_no_mass(family: str) -> None:
    target, draft = target_of(family), draft_of(family, "perfect")
    layer_types = getattr(target.config, "layer_types", None)
    sliding = [
        i
        for i in range(target.config.num_hidden_layers)
        if layer_types is None or layer_types[i] == "sliding_attention"
    ]
    assert sliding
    options = SpecOffloadConfig(block_size=BLOCK_SIZE, num_draft_tokens=3, poison=True)
    with SpecOffloadRunner(draft, target, options) as runner:
        runner.generate(prompt(70), max_new_tokens=9)
        signal = runner.last_signal()
    assert signal is not None
    first_query = int(signal.num_tokens[0]) - int(signal.num_rows[0])
    outside = (first_query - WINDOW + 1) // BLOCK_SIZE  # blocks that no query of the pass sees
    assert outside > 3
    for layer in sliding:
        assert not np.asarray(signal.mass)[0, layer, :, :outside].any()


def test_collecting_the_signal_changes_no_token(tmp_path: Path) -> None:
    target, draft = target_of("gpt_oss"), draft_of("gpt_oss", "noisy")
    ids = prompt(50)
    expected = plain_generate(target, ids, max_new_tokens=30)
    for collect in (False, True):
        options = _options(tmp_path, num_draft_tokens=4, collect_signal=collect)
        with SpecOffloadRunner(draft, target, SpecOffloadConfig(**options)) as runner:
            assert runner.generate(ids, max_new_tokens=30).equal(expected)
            assert (runner.last_signal() is not None) == collect
