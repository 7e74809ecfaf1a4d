"""The promise: float32 greedy output is, token for token, that of plain `target.generate`.

Whatever the family, draft, budgets, block size, gamma, prefill and batch. The long run is
`HYPOTHESIS_PROFILE=night pytest tests/cpu/test_identity.py`.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, currently_in_test_context, event, example, given, settings
from strategies import FAMILIES, Case, cases
from vocabulary import (
    TOLERANCES,
    assert_exact,
    assert_same_tokens,
    draft_of,
    kv_bytes,
    minimum_budget,
    pad_left,
    plain_generate,
    plain_generate_with_gap,
    prompt,
    target_of,
    words,
)

from specoffload import RunReport, SpecOffloadConfig, SpecOffloadRunner
from specoffload.core.gamma import AutoGamma
from specoffload.tiers.homes import Homes

pytestmark = pytest.mark.timeout(max(300, 6 * settings.default.max_examples))


def _config(case: Case, folder: Path) -> SpecOffloadConfig:
    """Turn what was drawn into a configuration with budgets in bytes."""
    draft = draft_of(case.family, case.draft, case.weights)
    target = target_of(case.family, case.weights)
    most = max(case.lengths) + case.max_new_tokens
    everything = len(case.lengths) * sum(
        kv_bytes(model, most, case.block_size) for model in (draft, target)
    )
    one_block = kv_bytes(target, 1, case.block_size) // target.config.num_hidden_layers
    options: dict[str, Any] = {
        "host_budget": {"none": 0, "small": 3 * one_block, "auto": "auto"}[case.host],
        "disk_path": folder if case.disk else None,
        "block_size": case.block_size,
        "num_draft_tokens": case.num_draft_tokens,
        "prefill_chunk": case.prefill_chunk,
        "poison": True,
    }
    if case.device is None:
        return SpecOffloadConfig(**options)
    # The minimum is asked of a runner with the very same options.
    minimum = minimum_budget(draft, target, SpecOffloadConfig(**options))
    return SpecOffloadConfig(device_budget=minimum + int(case.device * everything), **options)


def _oracle(case: Case, rows: list[list[int]]) -> list[torch.Tensor]:
    """Return each row's new tokens: it is run alone, and the padded batch must agree."""
    target = target_of(case.family, case.weights)
    options = {"max_new_tokens": case.max_new_tokens}
    found = [plain_generate_with_gap(target, row, **options) for row in rows]
    alone = [tokens for tokens, _ in found]
    # A tie within rounding has no right answer: one case in eight is put aside.
    is_clear = min(gap for _, gap in found) > TOLERANCES[torch.float32].logits
    if currently_in_test_context():
        assume(is_clear)
    else:
        assert is_clear, "a case that is run by itself must have one answer"
    if len(rows) > 1:
        batch = plain_generate(target, *pad_left(rows), **options)[:, max(case.lengths) :]
        for row, mine, together in zip(rows, alone, batch, strict=True):
            assert_same_tokens(target, row, together, mine, what="the oracle contradicts itself")
    return alone


def _check_report(report: RunReport, case: Case, config: SpecOffloadConfig) -> None:
    num_rows, num_new = len(case.lengths), case.max_new_tokens
    assert report.prompt_tokens == sum(case.lengths)
    assert report.new_tokens == num_rows * num_new
    assert report.device_budget_bytes == config.device_budget_bytes
    assert 0 < report.peak_device_bytes <= report.device_bytes
    if config.device_budget_bytes is not None:
        assert report.device_bytes <= config.device_budget_bytes
    assert 0 <= report.blocks_written <= report.blocks_filled
    assert report.kv_bytes > 0
    assert 0 <= report.accepted_tokens <= report.drafted_tokens
    if case.num_draft_tokens != "auto":
        assert report.drafted_tokens <= case.num_draft_tokens * report.row_rounds
    assert report.rounds <= report.row_rounds <= report.rounds * num_rows
    # A row's first token comes from its prefill; each of its rounds gives the accepted tokens
    # and one more, except that the last round may be cut short.
    assert num_rows * (num_new - 1) <= report.accepted_tokens + report.row_rounds
    assert report.row_rounds <= num_rows * (num_new - 1)
    if config.num_draft_tokens == 0:
        assert report.drafted_tokens == 0
        assert report.rounds >= num_new - 1


def _check(case: Case) -> RunReport:
    target = target_of(case.family, case.weights)
    draft = draft_of(case.family, case.draft, case.weights)
    rows = [words(n, seed=case.text + i) for i, n in enumerate(case.lengths)]
    expected = _oracle(case, rows)
    chosen = itertools.cycle(case.choices)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoGamma, "choose", lambda auto: min(next(chosen), auto.max_gamma))
        config = _config(case, Path(folder))
        with SpecOffloadRunner(draft, target, config) as runner:
            ids, mask = pad_left(rows)
            out = runner.generate(ids, mask, max_new_tokens=case.max_new_tokens)
            report = runner.report()
        assert not list(Path(folder).iterdir()), "the spill file has a name"
    assert out.shape == (len(rows), ids.shape[1] + case.max_new_tokens)
    assert out[:, : ids.shape[1]].equal(ids), "the prompts came back changed"
    for i, row in enumerate(rows):
        new = out[i, ids.shape[1] :]
        assert_same_tokens(target, row, new, expected[i], what=f"row {i}")
    _check_report(report, case, config)
    return report


_SPILLED = {
    "weights": 0,
    "block_size": 4,
    "prefill_chunk": 16,
    "device": 0.0,
    "host": "none",
    "disk": True,
    "text": 1,
}


@example(  # ragged rows, each crossing blocks and windows, everything but the minimum on disk
    Case(
        family="gemma3",
        draft="noisy",
        num_draft_tokens=7,
        lengths=(1, 40, 17),
        max_new_tokens=40,
        **_SPILLED,
    )
)
@example(  # rejections at every round, at the edge of the window
    Case(
        family="mistral",
        draft="poor",
        num_draft_tokens=5,
        lengths=(15,),
        max_new_tokens=30,
        **_SPILLED,
    )
)
@example(  # sinks, a draft with another KV shape, gamma chosen by the runner
    Case(
        family="gpt_oss",
        draft="stranger",
        num_draft_tokens="auto",
        lengths=(33, 64),
        max_new_tokens=20,
        **_SPILLED,
    )
)
@example(  # rows that did not draft for a while catch up together, with no room to do it at once
    Case(
        family="llama",
        draft="noisy",
        num_draft_tokens="auto",
        choices=(*[0] * 20, 5),
        lengths=(60, 5),
        max_new_tokens=39,
        **{**_SPILLED, "prefill_chunk": 39, "device": 0.1},
    )
)
@given(cases())
def test_tokens_are_those_of_plain_generate(case: Case) -> None:
    report = _check(case)
    event("rolled back" if report.accepted_tokens < report.drafted_tokens else "no roll-back")
    event("moved up" if report.bytes_up else "nothing moved up")


def test_blocks_that_leave_their_window_in_flight_give_up_their_homes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Homes are counted: where one keeps a block that nobody sees, another block has none."""
    delays, read = random.Random(0), Homes.read

    def late(homes: Homes, *args: Any) -> None:
        time.sleep(delays.choice([0, 0, 0.01, 0.03]))
        read(homes, *args)

    monkeypatch.setattr(Homes, "read", late)
    for _ in range(8):
        _check(
            Case(
                family="mistral",
                draft="noisy",
                weights=0,
                block_size=8,
                num_draft_tokens=6,
                prefill_chunk=13,
                device=0.03,
                host="auto",
                disk=False,
                lengths=(66, 53, 53),
                text=3624,
                max_new_tokens=26,
            )
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["perfect", "noisy"])
@pytest.mark.parametrize("gamma", [4, 8])
def test_good_drafts_are_accepted_and_rolled_back(
    family: str, kind: str, gamma: int, tmp_path: Path
) -> None:
    """Were whole drafts never accepted, or never cut, the property above would examine little."""
    target, draft = target_of(family), draft_of(family, kind)
    options: dict[str, Any] = {
        "block_size": 4,
        "num_draft_tokens": gamma,
        "host_budget": 0,
        "disk_path": tmp_path,
        "poison": True,
    }
    minimum = minimum_budget(draft, target, SpecOffloadConfig(**options))
    rounds = accepted = drafted = gained = 0
    with SpecOffloadRunner(
        draft, target, SpecOffloadConfig(device_budget=minimum, **options)
    ) as runner:
        for seed in range(2):
            ids = prompt(30 + seed, seed=seed)
            assert_exact(runner, target, ids, max_new_tokens=40)
            report = runner.report()
            assert report.bytes_up > 0, "the smallest budget must not hold the whole KV"
            rounds += report.row_rounds
            accepted += report.accepted_tokens
            drafted += report.drafted_tokens
            gained += report.new_tokens - 1  # the first token is the prefill's
    assert gained > 2 * rounds, f"{gained / rounds:.2f} tokens a verify"
    if kind == "perfect":
        assert accepted == drafted
    else:
        assert accepted < drafted, "nothing was rolled back"


@pytest.mark.parametrize("kind", ["poor", "stranger"])
def test_a_useless_draft_changes_nothing(kind: str, tmp_path: Path) -> None:
    target, draft = target_of("llama"), draft_of("llama", kind)
    options = SpecOffloadConfig(
        block_size=4, num_draft_tokens=6, host_budget=0, disk_path=tmp_path, poison=True
    )
    with SpecOffloadRunner(draft, target, options) as runner:
        assert_exact(runner, target, prompt(30), max_new_tokens=40)
        report = runner.report()
    assert report.acceptance is not None
    assert 2 * report.accepted_tokens < report.drafted_tokens


def test_a_batch_that_does_not_fit_together_is_run_in_groups(tmp_path: Path) -> None:
    target, draft = target_of("llama"), draft_of("llama", "noisy")
    options: dict[str, Any] = {
        "block_size": 8,
        "num_draft_tokens": 4,
        "disk_path": tmp_path,
        "poison": True,
    }
    minimum = minimum_budget(draft, target, SpecOffloadConfig(**options))
    rows = [words(n, seed=n) for n in (5, 60, 1, 33, 17)]
    ids, mask = pad_left(rows)
    with SpecOffloadRunner(
        draft, target, SpecOffloadConfig(device_budget=minimum, **options)
    ) as runner:
        out = runner.generate(ids, mask, max_new_tokens=20)
        report = runner.report()
    assert report.peak_device_bytes <= minimum
    for i, row in enumerate(rows):
        want = plain_generate(target, torch.tensor([row]), max_new_tokens=20)[0, len(row) :]
        assert_same_tokens(target, row, out[i, ids.shape[1] :], want, what=f"row {i}")


def test_the_same_call_gives_the_same_tokens_at_every_budget(tmp_path: Path) -> None:
    """Between the minimum and everything there is no budget at which tokens change."""
    target, draft = target_of("gpt_oss"), draft_of("gpt_oss", "noisy")
    options: dict[str, Any] = {
        "block_size": 4,
        "num_draft_tokens": 5,
        "disk_path": tmp_path,
        "poison": True,
    }
    minimum = minimum_budget(draft, target, SpecOffloadConfig(**options))
    ids = prompt(50)
    everything = sum(kv_bytes(model, 80, 4) for model in (draft, target))
    expected = plain_generate(target, ids, max_new_tokens=24)
    moved = []
    for tenths in range(0, 13, 2):
        budget = minimum + everything * tenths // 10
        with SpecOffloadRunner(
            draft, target, SpecOffloadConfig(device_budget=budget, **options)
        ) as runner:
            assert_exact(
                runner, target, ids, max_new_tokens=24, expected=expected, what=f"{budget}"
            )
            report = runner.report()
        assert report.peak_device_bytes <= budget
        moved.append(report.bytes_up)
    assert moved[0] > 0
    assert moved[-1] == 0, "everything fits and yet blocks were moved"
