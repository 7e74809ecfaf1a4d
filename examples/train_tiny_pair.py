"""Train the tiny pair from nothing: a 4-layer target and a 2-layer draft of the recall task.

One CPU thread does it in minutes. What makes it short: a curriculum of 4, 8, 16, 32 and 64
table entries, each left as soon as it is learnt, and embeddings that start as a key part plus a
value part, so that a key's query and its entry are near one another before the first step.

    python examples/train_tiny_pair.py --out /tmp/tiny_pair
    python examples/train_tiny_pair.py --out /tmp/tiny_pair --check-only
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from specoffload.recall_task import (
    BOS,
    FIRST_QUERY,
    FIRST_VALUE,
    NUM_KEYS,
    NUM_VALUES,
    VOCAB_SIZE,
    recall_prompt,
)

SHAPES = {
    "target": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
    "draft": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
}
CURRICULUM = (4, 8, 16, 32, 64)
TEST_SEED = 1 << 40  # training counts its seeds up from 0


def make_model(role: str) -> LlamaForCausalLM:
    """An untrained model whose embeddings already say what their tokens are made of."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=None,
        **SHAPES[role],
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        table_VD = model.model.embed_tokens.weight
        table_VD.normal_(std=config.hidden_size**-0.5)
        key_KD = table_VD[FIRST_QUERY : FIRST_QUERY + NUM_KEYS]
        value_AD = table_VD[FIRST_VALUE : FIRST_VALUE + NUM_VALUES]
        table_VD[:FIRST_QUERY] = (key_KD[:, None] + value_AD[None]).flatten(0, 1) * 0.5**0.5
    return model


def make_batch(num_entries: int, slot: int, first_seed: int, size: int) -> tuple[Tensor, int]:
    """Sequences `[size, num_tokens]` that ask for every entry once, and where the stream starts."""
    prompts = [
        recall_prompt(num_entries, slot, first_seed + row, num_queries=num_entries)
        for row in range(size)
    ]
    ids = np.stack([prompt.ids for prompt in prompts])
    return torch.from_numpy(ids), prompts[0].prompt_length - 1


def train(role: str, args: argparse.Namespace) -> LlamaForCausalLM:
    """Climb the curriculum; the last step of it lowers the learning rate to zero."""
    torch.manual_seed(args.seed)
    model = make_model(role)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    step, began, cpu_began = 0, time.monotonic(), time.process_time()
    for num_entries in CURRICULUM:
        is_last = num_entries == CURRICULUM[-1]
        right, taken = 0.0, 0
        while taken < args.last_steps if is_last else (right < args.learnt and taken < 2000):
            ids_BT, start = make_batch(num_entries, args.slot, step * args.batch, args.batch)
            hidden_BSD = model.model(ids_BT, use_cache=False)[0][:, start:-1]
            logits_NV = model.lm_head(hidden_BSD).flatten(0, 1)
            answers_N = ids_BT[:, start + 1 :].flatten()
            functional.cross_entropy(logits_NV, answers_N).backward()
            left = 1 - taken / args.last_steps if is_last else 1.0
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1.0, (step + 1) / 50) * left
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            is_value_N = answers_N >= FIRST_VALUE
            hits_N = (logits_NV.argmax(-1) == answers_N)[is_value_N]
            right += 0.1 * (hits_N.float().mean().item() - right)
            step, taken = step + 1, taken + 1
            if step % 25 == 0:
                spent = f"{time.process_time() - cpu_began:.0f} CPU-s"
                print(
                    f"{role}: step {step}, {num_entries} entries, {right:.3f} right, {spent}",
                    flush=True,
                )
        print(
            f"{role}: {num_entries} entries after {step} steps, {right:.3f} right, "
            f"{time.process_time() - cpu_began:.0f} CPU-s, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return model.eval()


@torch.inference_mode()
def check(models: dict[str, LlamaForCausalLM], num_prompts: int = 40) -> None:
    """Print recall at two lengths, and what the pair accepts per greedy round of 4."""
    for slot in (8, 15):
        prompts = [recall_prompt(64, slot, TEST_SEED + number) for number in range(num_prompts)]
        ids_BT = torch.from_numpy(np.stack([prompt.ids for prompt in prompts]))
        said = {
            role: torch.cat([m(row[None]).logits.argmax(-1) for row in ids_BT]).numpy()
            for role, m in models.items()
        }
        for role, said_BT in said.items():
            hits = [
                row[prompt.query_positions] == prompt.values
                for row, prompt in zip(said_BT, prompts, strict=True)
            ]
            print(f"{role}: {np.mean(hits):.3f} right of 64 entries, {ids_BT.shape[1]} tokens")
        start = prompts[0].prompt_length - 1
        agreed_BS = (said["draft"] == said["target"])[:, start:-1]
        print(f"pair: {np.mean([accepted(row) for row in agreed_BS]):.2f} of 4 accepted")


def accepted(agreed: np.ndarray, gamma: int = 4) -> float:
    """Mean number of drafted tokens that a greedy round accepts, along the right stream."""
    counts, position = [], 0
    while position + gamma <= len(agreed):
        wrong = np.flatnonzero(~agreed[position : position + gamma])
        counts.append(int(wrong[0]) if wrong.size else gamma)
        position += counts[-1] + 1
    return float(np.mean(counts))


def main() -> None:
    """Train both models, save them as two folders, and check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for target/ and draft/")
    add("--check-only", action="store_true", help="measure what --out holds")
    add("--slot", type=int, default=8, help="tokens per table entry")
    add("--batch", type=int, default=16, help="sequences per step")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--learnt", type=float, default=0.9, help="share of right values that ends a stage")
    add("--last-steps", type=int, default=50, help="steps of the last stage")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = {}
    for role in SHAPES:
        if not args.check_only:
            train(role, args).save_pretrained(args.out / role)
        models[role] = LlamaForCausalLM.from_pretrained(args.out / role)
    check(models)


if __name__ == "__main__":
    main()
