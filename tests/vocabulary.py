"""The words that tests are written in: tiny models, the oracle, one table of tolerances.

Knows torch and transformers, so `tests/core` does not import it. Everything here uses public names
of the package only.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from strategies import FAMILIES, FIRST_WORD, VOCAB_SIZE
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specoffload import SpecOffloadConfig, SpecOffloadRunner

PAD = 0
WINDOW = 16
"""Keys that a query sees in a sliding-window layer of the models below, itself included."""
MAX_POSITIONS = 512


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a value may lie from the reference: largest absolute difference.

    Attributes:
        logits: logits of the tiny models, which reach about 9.
        mass: attention mass of one block, at most 1.
        attention: what attention returns over values of unit variance.
    """

    logits: float
    mass: float
    attention: float


TOLERANCES = {torch.float32: Tolerance(logits=1e-4, mass=1e-4, attention=1e-5)}
"""The only place where a test finds out how close is close enough."""


def assert_near(actual: Any, expected: Any, *, atol: float, what: str) -> None:
    """Fail unless two arrays have one shape, are finite and differ by at most `atol` anywhere."""
    a, b = (np.asarray(x.detach() if torch.is_tensor(x) else x) for x in (actual, expected))
    assert a.shape == b.shape, f"{what}: shape {a.shape}, expected {b.shape}"
    assert np.isfinite(a).all(), f"{what}: not finite"
    error = np.abs(a - b).max(initial=0.0)
    assert error <= atol, f"{what}: off by {error:.3g}, more than {atol:.3g}"


# The targets. Weights have a wide spread: with the usual 0.02 greedy text is one token for ever,
# and an implementation that forgot its cache would still be right.


def _shape(**kwargs: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
        **kwargs,
    }


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_shape(num_hidden_layers=3)))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_shape(num_hidden_layers=2, num_key_value_heads=4)))


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(
        MistralConfig(**_shape(num_hidden_layers=2, num_key_value_heads=1, sliding_window=WINDOW))
    )


def _gemma3() -> PreTrainedModel:
    local, everywhere = "sliding_attention", "full_attention"
    config = Gemma3TextConfig(
        **_shape(
            num_hidden_layers=4,
            layer_types=[local, local, everywhere, local],
            sliding_window=WINDOW,
            query_pre_attn_scalar=16,
        )
    )
    return Gemma3ForCausalLM(config)


def _gpt_oss() -> PreTrainedModel:
    config = GptOssConfig(
        **_shape(
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=32,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": MAX_POSITIONS // 32,
            },
        )
    )
    model = GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # large enough to take a good part of each row's mass
            torch.nn.init.normal_(parameter, mean=1.0, std=1.0)
    return model


def _phi3() -> PreTrainedModel:
    shape = _shape(num_hidden_layers=2)
    del shape["head_dim"]
    return Phi3ForCausalLM(Phi3Config(**shape))


def _glm4() -> PreTrainedModel:
    return Glm4ForCausalLM(Glm4Config(**_shape(num_hidden_layers=2)))


_BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "phi3": _phi3,
    "glm4": _glm4,
}
assert tuple(_BUILDERS) == FAMILIES

NOISE = 0.01
"""Noise of the noisy draft, relative to each weight's spread: of its tokens 83 to 94 % are
accepted, by family. `test_identity.py` checks that most are and some are not."""


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model in float32, for inference, with a generation configuration that never ends
    a row by itself.
    """
    model = model.float().eval().requires_grad_(False)
    model.generation_config = GenerationConfig(
        eos_token_id=None, pad_token_id=PAD, bos_token_id=1, do_sample=False
    )
    return model


@functools.cache
def target_of(family: str, seed: int = 0) -> PreTrainedModel:
    """Return the tiny random target of a family: built once, shared by all tests."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ready(_BUILDERS[family]())


@functools.cache
def draft_of(family: str, kind: str, seed: int = 0) -> PreTrainedModel:
    """Return a draft for `target_of(family, seed)`.

    perfect: a copy, every token accepted. noisy: a copy with noise, most tokens accepted and some
    not. poor: the first layer only, with its own embedding and head. stranger: a small model of
    another family with another KV shape.
    """
    if kind == "stranger":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 100)
            config = LlamaConfig(
                **_shape(
                    num_hidden_layers=1,
                    hidden_size=32,
                    num_attention_heads=4,
                    num_key_value_heads=1,
                    head_dim=8,
                )
            )
            return ready(LlamaForCausalLM(config))
    draft = copy.deepcopy(target_of(family, seed))
    if kind == "noisy":
        generator = torch.Generator().manual_seed(seed + 1)
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * (NOISE * parameter.std()))
    elif kind == "poor":
        draft.model.layers = draft.model.layers[:1]
        draft.config.num_hidden_layers = 1
        if getattr(draft.config, "layer_types", None):
            draft.config.layer_types = draft.config.layer_types[:1]
    else:
        assert kind == "perfect", kind
    return draft


# The oracle: plain greedy generation by transformers. Never its assisted generation, which is
# wrong with a kept cache.


def plain_generate(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return what `target.generate` returns without sampling, beams, a draft or a kept cache."""
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    with torch.inference_mode():
        return target.generate(
            input_ids, attention_mask=attention_mask, do_sample=False, num_beams=1, **kwargs
        )


def plain_generate_with_gap(
    target: PreTrainedModel, row: Sequence[int], *, max_new_tokens: int
) -> tuple[torch.Tensor, float]:
    """Return the new tokens of one prompt, and how close the oracle came to a tie.

    That is the smallest gap between the two largest logits at any of them. Where it is within
    rounding, plain generation itself gives other tokens on another machine, or in a batch.
    """
    out = plain_generate(
        target,
        torch.tensor([row]),
        max_new_tokens=max_new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits).topk(2).values
    return out.sequences[0, len(row) :], float((best[..., 0] - best[..., 1]).min())


def words(num_tokens: int, *, seed: int) -> list[int]:
    """Return a prompt of random tokens, none of them special."""
    return np.random.default_rng(seed).integers(FIRST_WORD, VOCAB_SIZE, num_tokens).tolist()


def prompt(num_tokens: int, *, seed: int = 0) -> torch.Tensor:
    """Return one random prompt, `[1, num_tokens]`."""
    return torch.tensor([words(num_tokens, seed=seed)])


def pad_left(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, both `[rows, longest]`, of rows of different length."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row)
        mask[i, width - len(row) :] = 1
    return ids, mask


def assert_same_tokens(
    target: PreTrainedModel,
    row: Sequence[int],
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    what: str = "",
) -> None:
    """Fail unless two generated sequences, prompt left out, are the same.

    The message tells a bug from a near tie of float32: it has the gap between the two largest
    logits that the target has at the first position that differs, and the gap between the two
    tokens in question.

    Args:
        target: plain model to ask.
        row: the prompt without padding.
        actual: what the runner added to it.
        expected: what the oracle added to it.
        what: where this was.
    """
    got, want = actual.tolist(), expected.tolist()
    if got == want:
        return
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
    if at is None:
        at = min(len(got), len(want))
        raise AssertionError(
            f"{what}: {len(got)} tokens instead of {len(want)}, the first {at} are right\n"
            f"  got      {got}\n  expected {want}"
        )
    with torch.inference_mode():
        history = torch.tensor([[*row, *want[:at]]], device=target.device)
        logits = target(history, attention_mask=torch.ones_like(history)).logits[0, -1].double()
    top = logits.topk(2)
    gap = float(top.values[0] - top.values[1])
    behind = float(top.values[0] - logits[got[at]])
    near = behind < TOLERANCES[torch.float32].logits
    verdict = "a NEAR TIE of float32" if near else "a BUG: no rounding explains it"
    raise AssertionError(
        f"{what}: new token {at} is {got[at]} instead of {want[at]}: {verdict}\n"
        f"  the target's two best tokens there are {top.indices.tolist()}, {gap:.3g} apart; "
        f"token {got[at]} is {behind:.3g} behind the best\n"
        f"  got      {got}\n  expected {want}"
    )


def assert_exact(
    runner: SpecOffloadRunner,
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    what: str = "",
    expected: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Fail unless the runner returns for one prompt `[1, n]` what plain generation does.

    Args:
        runner: who is examined.
        target: the plain model.
        input_ids: the prompt.
        what: where this was.
        expected: the oracle's answer, where it is known already.
        kwargs: given to both `generate`.

    Returns:
        What the runner returned.
    """
    actual = runner.generate(input_ids, **kwargs)
    if expected is None:
        expected = plain_generate(target, input_ids, **kwargs)
    n = input_ids.shape[1]
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    assert actual[:, :n].equal(expected[:, :n]), f"{what}: the prompt came back changed"
    assert_same_tokens(
        target, input_ids[0].tolist(), actual[0, n:], expected[0, n:], what=what or str(kwargs)
    )
    return actual


# Budgets.


def kv_bytes(model: PreTrainedModel, num_tokens: int, block_size: int) -> int:
    """Return the bytes of the blocks that hold `num_tokens` tokens of one sequence, float32."""
    config = model.config
    heads = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_blocks = -(-num_tokens // block_size)
    return num_blocks * config.num_hidden_layers * 2 * heads * block_size * size * 4


def minimum_budget(
    draft: PreTrainedModel, target: PreTrainedModel, config: SpecOffloadConfig
) -> int:
    """Return the smallest device budget for a pair, in bytes: the runner is asked."""
    with SpecOffloadRunner(draft, target, config) as runner:
        return runner.minimum_device_bytes


# What must not be left behind.


@dataclass
class Traces:
    """What can outlive a runner: its threads, files, hooks and attention functions."""

    threads: set[int | None]
    fds: dict[str, str]
    files: dict[Path, set[Path]]
    hooks: list[int]
    attention: list[str]
    classes: list[type]


def _open_files() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = str(entry.readlink())
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def _traces(models: Sequence[PreTrainedModel], folders: Sequence[Path]) -> Traces:
    return Traces(
        threads={t.ident for t in threading.enumerate()},
        fds=_open_files(),
        files={folder: set(folder.rglob("*")) for folder in folders},
        hooks=[
            sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
            for model in models
        ],
        attention=[model.config._attn_implementation for model in models],
        classes=[type(model) for model in models],
    )


@contextmanager
def assert_clean(*models: PreTrainedModel, folders: Sequence[Path] = ()) -> Iterator[None]:
    """Fail if the body leaves a thread, an open file, a file in `folders`, a forward hook, another
    class or another attention implementation behind.

    Threads get a second to end.
    """
    before = _traces(models, folders)
    yield
    deadline = time.monotonic() + 1.0
    while True:
        after = _traces(models, folders)
        threads = after.threads - before.threads
        if not threads or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    names = [t.name for t in threading.enumerate() if t.ident in threads]
    assert not threads, f"threads left behind: {names}"
    opened = {fd: path for fd, path in after.fds.items() if before.fds.get(fd) != path}
    assert not opened, f"files left open: {opened}"
    for folder, files in after.files.items():
        assert files == before.files[folder], f"files left: {files - before.files[folder]}"
    assert after.hooks == before.hooks, f"forward hooks: {before.hooks} before, {after.hooks} now"
    assert after.attention == before.attention, (
        f"attention implementation: {before.attention} before, {after.attention} now"
    )
    assert after.classes == before.classes


@dataclass
class ForwardCount:
    """Forward passes of each watched model."""

    calls: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.calls)


@contextmanager
def count_forwards(*models: torch.nn.Module) -> Iterator[ForwardCount]:
    """Count how often each model's embedding is asked: once for each forward pass."""
    count = ForwardCount(calls=[0] * len(models))

    def counter(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            count.calls[index] += 1

        return hook

    with ExitStack() as stack:
        for index, model in enumerate(models):
            embedding = model.get_input_embeddings()
            stack.callback(embedding.register_forward_pre_hook(counter(index)).remove)
        yield count
