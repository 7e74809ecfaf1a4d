"""Decode with the pair inside the package, with most of the KV on disk, and compare.

python examples/quickstart.py
"""

from __future__ import annotations

import tempfile

import torch

from specoffload import SpecOffloadConfig, SpecOffloadRunner, load_pair
from specoffload.recall_task import recall_prompt


def main() -> None:
    pair = load_pair("tiny")
    recall = recall_prompt(num_entries=64, slot=8, seed=1)
    input_ids = torch.from_numpy(recall.ids[: recall.prompt_length])[None]

    with tempfile.TemporaryDirectory() as folder:
        config = SpecOffloadConfig(
            device_budget="384KiB", host_budget=0, disk_path=folder, block_size=16
        )
        with SpecOffloadRunner(pair.draft, pair.target, config) as runner:
            output_ids = runner.generate(input_ids, max_new_tokens=48)
            print(runner.report())

    plain = pair.target.generate(input_ids, max_new_tokens=48, do_sample=False)
    print(f"{'identical':<12}{torch.equal(output_ids, plain)}")


if __name__ == "__main__":
    main()
