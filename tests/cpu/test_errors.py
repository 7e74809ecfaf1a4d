"""What cannot be done is refused: at once, in words, before any forward pass, leaving no damage."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from strategies import VOCAB_SIZE
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from vocabulary import (
    PAD,
    assert_clean,
    assert_exact,
    count_forwards,
    draft_of,
    minimum_budget,
    plain_generate,
    prompt,
    ready,
    target_of,
)

from specoffload import (
    BudgetError,
    ConfigError,
    SpecOffloadConfig,
    SpecOffloadError,
    SpecOffloadRunner,
    UnsupportedModelError,
)

FAMILY = "llama"


def _pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    return draft_of(FAMILY, "noisy"), target_of(FAMILY)


@contextmanager
def _refused(
    *models: PreTrainedModel, error: type = SpecOffloadError, saying: str
) -> Iterator[Any]:
    """Expect `error` with a message that `saying` is found in, and not one forward pass."""
    with count_forwards(*models) as count, pytest.raises(error, match=saying) as caught:
        yield caught
    assert count.total == 0, "a forward pass was run before the refusal"
    assert isinstance(caught.value, ValueError)


# Models.


def _t5() -> PreTrainedModel:
    config = T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    return T5ForConditionalGeneration(config).eval()


def _mamba() -> PreTrainedModel:
    config = MambaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=1, state_size=4, pad_token_id=PAD
    )
    return MambaForCausalLM(config).eval()


def _headless() -> PreTrainedModel:
    return LlamaModel(target_of(FAMILY).config).eval()


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize(
    ("build", "name"),
    [(_t5, "T5ForConditionalGeneration"), (_mamba, "MambaForCausalLM"), (_headless, "LlamaModel")],
    ids=["encoder-decoder", "recurrent", "headless"],
)
def test_models_that_cannot_be_paged_are_refused(
    role: str, build: Callable[[], PreTrainedModel], name: str
) -> None:
    draft, target = _pair()
    wrong = build()
    pair = (wrong, target) if role == "draft" else (draft, wrong)
    with (
        assert_clean(*pair),
        _refused(*pair, error=UnsupportedModelError, saying=name) as caught,
    ):
        SpecOffloadRunner(*pair, SpecOffloadConfig())
    assert role in str(caught.value), "the message does not say which of the two models it is"


def test_what_is_no_model_at_all_is_refused() -> None:
    draft, target = _pair()
    for pair in ((draft, None), (draft, "gpt2"), (torch.nn.Linear(2, 2), target)):
        with pytest.raises(UnsupportedModelError):
            SpecOffloadRunner(*pair, SpecOffloadConfig())  # type: ignore[arg-type]


def test_vocabularies_of_different_size_are_refused() -> None:
    draft, target = _pair()
    config = copy.deepcopy(draft.config)
    config.vocab_size = 128
    small = ready(LlamaForCausalLM(config))
    for pair in ((small, target), (target, small)):
        with _refused(*pair, error=UnsupportedModelError, saying="128") as caught:
            SpecOffloadRunner(*pair, SpecOffloadConfig())
        assert str(VOCAB_SIZE) in str(caught.value)


# Configuration and budgets.


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        ({"gama": 4}, "gama"),
        ({"num_draft_token": 4}, "num_draft_tokens"),
        ({"block_sise": 16}, "block_size"),
        ({"block_size": 24}, "24"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "16"}, "block_size"),
        ({"num_draft_tokens": -1}, "-1"),
        ({"num_draft_tokens": 17}, "17"),
        ({"num_draft_tokens": 1.5}, "1.5"),
        ({"num_draft_tokens": "4"}, "num_draft_tokens"),
        ({"num_draft_tokens": True}, "num_draft_tokens"),
        ({"device_budget": -1}, "device_budget"),
        ({"device_budget": "2 parsecs"}, "parsecs"),
        ({"device_budget": 1.5}, "device_budget"),
        ({"host_budget": "much"}, "host_budget"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], saying: str) -> None:
    draft, target = _pair()
    with _refused(draft, target, error=ConfigError, saying=re.escape(saying)):
        SpecOffloadRunner(draft, target, options)


def test_a_configuration_may_be_a_mapping_or_missing() -> None:
    draft, target = _pair()
    for config in (None, {}, {"num_draft_tokens": 3}, SpecOffloadConfig()):
        with SpecOffloadRunner(draft, target, config) as runner:
            assert_exact(runner, target, prompt(9), max_new_tokens=5)


@pytest.mark.parametrize("block_size", [4, 64])
@pytest.mark.parametrize("gamma", [0, 16])
@pytest.mark.parametrize("budget", ["0", "1", "half", "minimum - 1"])
def test_a_budget_too_small_is_refused_with_the_bytes_that_would_do(
    block_size: int, gamma: int, budget: str, tmp_path: Any
) -> None:
    draft, target = _pair()
    options: dict[str, Any] = {
        "block_size": block_size,
        "num_draft_tokens": gamma,
        "disk_path": tmp_path,
        "poison": True,
    }
    minimum = minimum_budget(draft, target, SpecOffloadConfig(**options))
    too_small = {"0": 0, "1": 1, "half": minimum // 2, "minimum - 1": minimum - 1}[budget]
    with (
        assert_clean(draft, target, folders=[tmp_path]),
        _refused(draft, target, error=BudgetError, saying=str(minimum)) as caught,
    ):
        SpecOffloadRunner(draft, target, SpecOffloadConfig(device_budget=too_small, **options))
    assert caught.value.required_bytes == minimum
    config = SpecOffloadConfig(device_budget=caught.value.required_bytes, **options)
    with SpecOffloadRunner(draft, target, config) as runner:
        assert runner.minimum_device_bytes == minimum
        assert_exact(runner, target, prompt(70), max_new_tokens=9)


def test_blocks_that_fit_nowhere_are_refused_before_the_first_pass() -> None:
    """No disk, and host memory one byte short of what the device cannot hold."""
    draft, target = _pair()
    options: dict[str, Any] = {"block_size": 8, "num_draft_tokens": 4}
    minimum = minimum_budget(draft, target, SpecOffloadConfig(**options))
    options["device_budget"] = minimum
    ids = prompt(100)
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(host_budget=0, **options)) as runner:
        with _refused(draft, target, error=BudgetError, saying="host_budget") as caught:
            runner.generate(ids, max_new_tokens=40)
        assert_exact(runner, target, prompt(3), max_new_tokens=4)
    need = caught.value.required_bytes
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(host_budget=need, **options)) as runner:
        assert_exact(runner, target, ids, max_new_tokens=40)
        assert 0 < runner.report().host_bytes <= need
    config = SpecOffloadConfig(host_budget=need - 1, **options)
    with SpecOffloadRunner(draft, target, config) as runner:
        with _refused(draft, target, error=BudgetError, saying="host_budget") as caught:
            runner.generate(ids, max_new_tokens=40)
        assert caught.value.required_bytes == need


@pytest.mark.parametrize("what", ["a file", "missing"])
def test_a_spill_folder_that_cannot_be_used_is_refused_at_once(what: str, tmp_path: Any) -> None:
    draft, target = _pair()
    path = tmp_path / "kv"
    if what == "a file":
        path.write_text("not a folder")
    config = SpecOffloadConfig(disk_path=path)
    with count_forwards(draft, target) as count, pytest.raises((OSError, ValueError), match="kv"):
        SpecOffloadRunner(draft, target, config)
    assert count.total == 0


# Positions.


def _rope(limit: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.2,
        max_position_embeddings=limit,
        eos_token_id=None,
    )
    return ready(LlamaForCausalLM(config))


def _learned(limit: int) -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=limit,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
    )
    return ready(GPT2LMHeadModel(config))


@pytest.mark.parametrize("build", [_rope, _learned], ids=["rope", "learned"])
@pytest.mark.parametrize(("num_prompt", "num_new"), [(20, 13), (20, 14), (32, 1), (33, 1), (40, 5)])
def test_text_beyond_the_positions_is_refused(
    build: Callable[[int], PreTrainedModel], num_prompt: int, num_new: int
) -> None:
    target = build(32)
    draft = copy.deepcopy(target)
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(num_draft_tokens=8)) as runner:
        with _refused(draft, target, saying=r"\b32\b") as caught:
            runner.generate(prompt(num_prompt), max_new_tokens=num_new)
        assert re.search(rf"\b{num_prompt + num_new}\b", str(caught.value)), str(caught.value)
        assert_exact(runner, target, prompt(8), max_new_tokens=6)


@pytest.mark.parametrize("build", [_rope, _learned], ids=["rope", "learned"])
@pytest.mark.parametrize(("num_prompt", "num_new"), [(20, 12), (31, 1), (1, 31)])
def test_drafting_does_not_run_past_the_positions(
    build: Callable[[int], PreTrainedModel], num_prompt: int, num_new: int
) -> None:
    """The last allowed token is generated, with a draft that would look further ahead."""
    target = build(32)
    draft = copy.deepcopy(target)
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(num_draft_tokens=8)) as runner:
        assert_exact(runner, target, prompt(num_prompt), max_new_tokens=num_new)


def test_padding_takes_no_positions() -> None:
    """The limit is for each row's own tokens: the padded width alone is beyond it here."""
    target = _rope(32)
    draft = copy.deepcopy(target)
    ids = torch.cat([torch.full((1, 20), PAD), prompt(20)], dim=1)
    mask = (ids != PAD).long()
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(num_draft_tokens=4)) as runner:
        out = runner.generate(ids, mask, max_new_tokens=2)
    assert out.equal(plain_generate(target, ids, mask, max_new_tokens=2))


# Input.

_IDS = prompt(6)
_MASK = torch.ones_like(_IDS)
_TWO = torch.cat([_IDS, _IDS])


def _with(ids: torch.Tensor, at: int, value: int) -> torch.Tensor:
    changed = ids.clone()
    changed[0, at] = value
    return changed


@pytest.mark.parametrize(
    ("args", "kwargs", "saying"),
    [
        pytest.param((_IDS[:, :0],), {}, "input_ids", id="no token"),
        pytest.param((_IDS[:0],), {}, "input_ids", id="no row"),
        pytest.param((_IDS[0],), {}, "input_ids", id="one dimension"),
        pytest.param((_IDS[None],), {}, "input_ids", id="three dimensions"),
        pytest.param((_IDS.tolist(),), {}, "input_ids", id="list"),
        pytest.param((None,), {}, "input_ids", id="none"),
        pytest.param((_IDS.float(),), {}, "input_ids", id="float"),
        pytest.param((_IDS > 9,), {}, "input_ids", id="bool"),
        pytest.param((_with(_IDS, 2, VOCAB_SIZE),), {}, str(VOCAB_SIZE), id="id of vocabulary"),
        pytest.param((_with(_IDS, 2, -1),), {}, "-1", id="id below 0"),
        pytest.param((_IDS, _MASK[:, :5]), {}, "attention_mask", id="mask too short"),
        pytest.param((_IDS, _MASK[0]), {}, "attention_mask", id="mask of one dimension"),
        pytest.param((_TWO, _MASK), {}, "attention_mask", id="mask of one row for two"),
        pytest.param((_IDS, _MASK * 0), {}, "attention_mask", id="row of padding only"),
        pytest.param((_IDS, _with(_MASK, 5, 0)), {}, "left", id="padding on the right"),
        pytest.param((_IDS, _with(_MASK, 2, 0)), {}, "attention_mask", id="hole in the mask"),
        pytest.param((_IDS, _with(_MASK, 0, 2)), {}, "attention_mask", id="mask neither 0 nor 1"),
        pytest.param((_IDS, _MASK.tolist()), {}, "attention_mask", id="mask a list"),
        pytest.param((_IDS,), {"max_new_tokens": 0}, "max_new_tokens", id="0 new tokens"),
        pytest.param((_IDS,), {"max_new_tokens": -3}, "max_new_tokens", id="negative new tokens"),
        pytest.param((_IDS,), {"max_new_tokens": 2.5}, "max_new_tokens", id="2.5 new tokens"),
        pytest.param((_IDS,), {"max_new_tokens": None}, "max_new_tokens", id="no length"),
        pytest.param(
            (_IDS,), {"max_new_tokens": None, "max_length": 6}, "max_length", id="length of prompt"
        ),
        pytest.param(
            (_IDS,), {"max_new_tokens": None, "max_length": 3}, "max_length", id="length below"
        ),
        pytest.param((_IDS,), {"eos_token_id": "</s>"}, "eos_token_id", id="eos a text"),
    ],
)
def test_malformed_calls_are_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], saying: str
) -> None:
    draft, target = _pair()
    with SpecOffloadRunner(
        draft, target, SpecOffloadConfig(num_draft_tokens=3, block_size=4, poison=True)
    ) as runner:
        with _refused(draft, target, saying=re.escape(saying)):
            runner.generate(*args, **{"max_new_tokens": 4, **kwargs})
        assert_exact(runner, target, prompt(9), max_new_tokens=7)


def test_arguments_that_do_not_exist_are_refused() -> None:
    draft, target = _pair()
    with SpecOffloadRunner(draft, target, SpecOffloadConfig()) as runner:
        for name, value in {"max_new_tokenz": 3, "num_beams": 2, "do_sample": True}.items():
            with pytest.raises((TypeError, SpecOffloadError), match=name):
                runner.generate(_IDS, max_new_tokens=3, **{name: value})


def test_ids_of_another_integer_type_and_a_mask_of_truth_values_will_do() -> None:
    draft, target = _pair()
    with SpecOffloadRunner(draft, target, SpecOffloadConfig()) as runner:
        want = runner.generate(_IDS, max_new_tokens=4)
        assert runner.generate(_IDS.int(), max_new_tokens=4).tolist() == want.tolist()
        assert runner.generate(_IDS, _MASK.bool(), max_new_tokens=4).equal(want)
        assert runner.generate(_IDS, _MASK.float(), max_new_tokens=4).equal(want)


def test_a_batch_for_a_streamer_is_refused() -> None:
    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            raise AssertionError("nothing may be streamed")

        def end(self) -> None:
            pass

    draft, target = _pair()
    with (
        SpecOffloadRunner(draft, target, SpecOffloadConfig()) as runner,
        _refused(draft, target, saying="streamer"),
    ):
        runner.generate(_TWO, max_new_tokens=3, streamer=Streamer())


# The target's own generation configuration: what it asks for is done or refused.


@pytest.mark.parametrize(
    "asked",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        {"num_beams": 3},
        {"repetition_penalty": 1.3},
        {"encoder_repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[7]]},
        {"suppress_tokens": [7, 8]},
        {"begin_suppress_tokens": [7]},
        {"sequence_bias": [[[7], 5.0]]},
        {"min_new_tokens": 3, "eos_token_id": 9},
        {"min_length": 12, "eos_token_id": 9},
        {"forced_bos_token_id": 9},
        {"forced_eos_token_id": 9},
        {"exponential_decay_length_penalty": (5, 1.2)},
        {"guidance_scale": 1.5},
        {"stop_strings": ["x"]},
        {"max_time": 0.5},
        {"num_return_sequences": 2},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"prompt_lookup_num_tokens": 3},
        {"return_dict_in_generate": True},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_the_target_asks_for_is_refused_and_never_ignored(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, target = _pair()
    before = target.generation_config
    config = copy.deepcopy(before)
    for name, value in asked.items():
        setattr(config, name, value)
    option = next(iter(asked))
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(num_draft_tokens=3)) as runner:
        monkeypatch.setattr(target, "generation_config", config)
        saved = copy.deepcopy(config.to_dict())
        with _refused(draft, target, saying=option):
            runner.generate(_IDS, max_new_tokens=4)
        assert target.generation_config.to_dict() == saved
        monkeypatch.setattr(target, "generation_config", before)
        assert_exact(runner, target, _IDS, max_new_tokens=4)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        {"eos_token_id": -1},
        {"cache_implementation": "static"},
        {"use_cache": False},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_settings_without_an_effect_on_greedy_tokens_do_not_matter(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling where nothing is sampled, an end that never comes, the cache of transformers."""
    draft, target = _pair()
    expected = plain_generate(target, _IDS, max_new_tokens=4)
    config = GenerationConfig.from_dict({**target.generation_config.to_dict(), **asked})
    monkeypatch.setattr(target, "generation_config", config)
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(num_draft_tokens=3)) as runner:
        assert_exact(runner, target, _IDS, max_new_tokens=4, expected=expected)


def test_after_close_a_call_is_refused() -> None:
    draft, target = _pair()
    runner = SpecOffloadRunner(draft, target, SpecOffloadConfig())
    runner.close()
    runner.close()
    with _refused(draft, target, saying="closed"):
        runner.generate(_IDS, max_new_tokens=3)


def test_a_pair_on_two_devices_is_refused_with_the_remedy() -> None:
    draft = copy.deepcopy(draft_of("llama", "noisy")).to("meta")
    with pytest.raises(UnsupportedModelError, match="lie on cpu, meta: load draft and target on"):
        SpecOffloadRunner(draft, target_of("llama"))
    with pytest.raises(UnsupportedModelError, match="lies on meta, and blocks can be moved to"):
        SpecOffloadRunner(draft, draft)
