"""The data of the demo pair's distillation: the target's own words, and its final states.

Knows how a target is made to talk, to itself or on from a text, and what a shard and a held-out
sample hold. Refuses to know the draft: `distill_draft.py` trains and measures it.
"""

import argparse
import random
import time
import zlib
from typing import Any, NamedTuple

import torch
from distill_text import KINDS, QUESTIONS, Corpus
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

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


class ReservedLayer(DynamicLayer):
    """A cache layer of a known final length: it writes in place where `DynamicLayer` copies.

    At 64 rows and 256 tokens the copies cost a third of a step.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append `[rows, kv_heads, new, head_dim]`; views of all that is filled."""
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        if not self.is_initialized:
            rows, heads, _, dim = key_states.shape
            self.reserved = key_states.new_empty(2, rows, heads, self.length, dim)
            self.is_initialized = True
        self.reserved[0, :, :, start:stop] = key_states
        self.reserved[1, :, :, start:stop] = value_states
        self.keys, self.values = self.reserved[:, :, :, :stop]
        return self.keys, self.values


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
    cache.layers = [ReservedLayer(length) for _ in cache.layers]
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


@torch.inference_mode()
def read_along(target: LlamaForCausalLM, tokens: Tensor, rows_per_pass: int = 4) -> Shard:
    """The target's final states over rows `[rows, length]` that are given whole."""
    parts = [part.to(target.device) for part in tokens.split(rows_per_pass)]
    states = [target.model(part, use_cache=False)[0].half().cpu() for part in parts]
    return Shard(tokens.int(), torch.cat(states))


def make_shards(target: LlamaForCausalLM, corpus: Corpus, args: argparse.Namespace) -> list[Shard]:
    """Draw, or load again, as many shards of each sort as the command line says.

    The sorts take turns, so that what is there when time runs out is a mixture.
    """
    counts = {sort: getattr(args, sort) for sort in ("dialogue", "continuation", "plain", "long")}
    plan = [(sort, number) for sort, count in counts.items() for number in range(count)]
    plan.sort(key=lambda shard: (shard[1] + 0.5) / counts[shard[0]])
    shards = []
    for sort, number in plan:
        path = args.work / f"{sort}-{number}.safetensors"
        if not (args.resume and path.exists()):
            began = time.monotonic()
            shard = make_shard(
                target, corpus, args, sort, zlib.crc32(path.name.encode()) + args.seed
            )
            save_file(shard._asdict(), path)
            seconds = time.monotonic() - began
            num_rows, length = shard.tokens.shape
            print(
                f"shard {len(shards) + 1} of {len(plan)}, {path.stem}: {num_rows} x {length} tokens"
                f" in {seconds:.0f} s, {num_rows * length / seconds:.0f} tokens/s",
                flush=True,
            )
        shards.append(Shard(**load_file(path)))
    return shards


def make_shard(
    target: LlamaForCausalLM, corpus: Corpus, args: argparse.Namespace, sort: str, seed: int
) -> Shard:
    """One shard of `args.rows` rows of `args.length` tokens; as many tokens in fewer long rows."""
    length, num_rows = args.length, args.rows
    if sort == "dialogue":
        dialogue = Dialogue(corpus.tokenizer, num_rows)
        return teach(target, dialogue.prompt, length, seed, dialogue)
    if sort == "long":
        length, num_rows = args.long_length, num_rows * length // args.long_length
    rng = random.Random(seed)
    given = length // 2 if sort == "continuation" else length
    kinds = [KINDS[row // 2 % len(KINDS)] for row in range(num_rows)]
    rows = [corpus.draw(kind, given, rng, held_out=False) for kind in kinds]
    if sort == "continuation":
        return teach(target, torch.tensor(rows), length, seed, None)
    return read_along(target, torch.tensor(rows))


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
