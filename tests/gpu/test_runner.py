"""The whole runner on a GPU: the tokens of plain generation, at every budget."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from vocabulary import assert_same_tokens, draft_of, kv_bytes, plain_generate, prompt, target_of

from specoffload import SpecOffloadConfig, SpecOffloadRunner, UnsupportedModelError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU"),
]

TOKENS, NEW = 300, 40


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("host_budget", [0, "256KiB", "auto"])
def test_tokens_are_those_of_plain_generate_at_four_budgets(
    family: str, host_budget: int | str, tmp_path: Path
) -> None:
    target = copy.deepcopy(target_of(family)).to("cuda")
    draft = copy.deepcopy(draft_of(family, "noisy")).to("cuda")
    ids = prompt(TOKENS).to("cuda")
    expected = plain_generate(target, ids, max_new_tokens=NEW)
    options: dict[str, Any] = {
        "block_size": 8,
        "num_draft_tokens": 4,
        "host_budget": host_budget,
        "disk_path": tmp_path,
        "poison": True,
    }
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(**options)) as runner:
        least = runner.minimum_device_bytes
    everything = sum(kv_bytes(model, TOKENS + NEW, 8) for model in (draft, target))
    for budget in (None, least, least + everything // 10, least + everything // 2):
        config = SpecOffloadConfig(device_budget=budget, **options)
        with SpecOffloadRunner(draft, target, config) as runner:
            for _ in range(2):  # the second call finds the memory of the first
                out = runner.generate(ids, max_new_tokens=NEW)
                assert out.device == ids.device
                assert_same_tokens(
                    target,
                    ids[0].tolist(),
                    out[0, TOKENS:].cpu(),
                    expected[0, TOKENS:].cpu(),
                    what=f"budget {budget}",
                )
            report = runner.report()
            assert (report.bytes_up > 0) is (budget is not None)
            assert budget is None or report.peak_device_bytes <= budget


def test_a_pair_on_two_devices_is_refused_with_the_remedy() -> None:
    target = copy.deepcopy(target_of("llama")).to("cuda")
    with pytest.raises(UnsupportedModelError, match=r"cpu, cuda:0: load draft and target on one"):
        SpecOffloadRunner(draft_of("llama", "noisy"), target)
