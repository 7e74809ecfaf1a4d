"""Where generation ends, where blocks end, and what happens when it is interrupted."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from strategies import VOCAB_SIZE
from transformers import GenerationConfig, PreTrainedModel
from vocabulary import (
    PAD,
    assert_clean,
    assert_exact,
    assert_same_tokens,
    count_forwards,
    draft_of,
    minimum_budget,
    pad_left,
    plain_generate,
    prompt,
    target_of,
    words,
)

from specoffload import SpecOffloadConfig, SpecOffloadRunner

FAMILY = "llama"


def _options(folder: Path, **kwargs: Any) -> dict[str, Any]:
    return {
        "block_size": 4,
        "num_draft_tokens": 8,
        "host_budget": 0,
        "disk_path": folder,
        "prefill_chunk": 16,
        "poison": True,
        **kwargs,
    }


@contextmanager
def _tight_runner(
    kind: str, folder: Path, family: str = FAMILY, **kwargs: Any
) -> Iterator[SpecOffloadRunner]:
    """Open a runner with the smallest budget: every block that is not in use is on disk."""
    draft, target = draft_of(family, kind), target_of(family)
    options = _options(folder, **kwargs)
    minimum = minimum_budget(draft, target, SpecOffloadConfig(**options))
    with SpecOffloadRunner(
        draft, target, SpecOffloadConfig(device_budget=minimum, **options)
    ) as runner:
        yield runner


# The end token.

_ROW = words(20, seed=3)
_IDS = torch.tensor([_ROW])


@functools.cache
def _text() -> tuple[int, ...]:
    """Return the 40 tokens that greedily follow the prompt above."""
    return tuple(
        plain_generate(target_of(FAMILY), _IDS, max_new_tokens=40)[0, len(_ROW) :].tolist()
    )


def _ends() -> tuple[int, ...]:
    """Return the tokens that the text has at some positions, in this order."""
    return _text()[1:30:3]


@pytest.mark.parametrize("kind", ["perfect", "noisy", "poor"])
def test_an_end_token_inside_a_draft_ends_the_text(kind: str, tmp_path: Path) -> None:
    """Wherever it falls in a draft: nothing after it is returned, counted or streamed."""
    target = target_of(FAMILY)
    lengths = set()
    with _tight_runner(kind, tmp_path) as runner:
        for eos in _ends():
            streamer = Recorder()
            out = assert_exact(
                runner,
                target,
                _IDS,
                max_new_tokens=40,
                eos_token_id=eos,
                expected=plain_generate(target, _IDS, max_new_tokens=40, eos_token_id=eos),
                streamer=streamer,
            )
            num_new = out.shape[1] - len(_ROW)
            assert out[0, -1] == eos
            report = runner.report()
            assert report.new_tokens == num_new
            assert report.accepted_tokens < num_new, "tokens behind the end count as accepted"
            assert streamer.ids == out[0].tolist()
            lengths.add(num_new)
    assert len(lengths) > 4, "the end tokens do not lie at different places"


def test_an_end_token_may_be_one_of_several(tmp_path: Path) -> None:
    target = target_of(FAMILY)
    ends = _ends()
    never = next(i for i in range(3, VOCAB_SIZE) if i not in ends)
    with _tight_runner("perfect", tmp_path) as runner:
        for eos in ([ends[2], never], [never, ends[4]], [ends[5], ends[3]], [ends[4]]):
            assert_exact(runner, target, _IDS, max_new_tokens=40, eos_token_id=eos)


@pytest.mark.parametrize("several", [False, True])
def test_the_end_token_of_the_generation_configuration_counts(
    several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(FAMILY)
    eos, other = _ends()[3], _ends()[5]
    config = GenerationConfig(
        eos_token_id=[eos, 5] if several else eos, pad_token_id=PAD, bos_token_id=1
    )
    monkeypatch.setattr(target, "generation_config", config)
    with _tight_runner("perfect", tmp_path) as runner:
        short = assert_exact(runner, target, _IDS, max_new_tokens=40)
        assert short.shape[1] < len(_ROW) + 40
        # What the call says wins.
        assert_exact(runner, target, _IDS, max_new_tokens=40, eos_token_id=other)


def test_lengths_of_the_generation_configuration_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(FAMILY)
    for setting in ({"max_new_tokens": 7}, {"max_length": 26}):
        config = GenerationConfig(eos_token_id=None, pad_token_id=PAD, **setting)
        monkeypatch.setattr(target, "generation_config", config)
        with _tight_runner("perfect", tmp_path) as runner:
            assert_exact(runner, target, _IDS)
            assert_exact(runner, target, _IDS, max_new_tokens=3)


def test_an_end_token_of_the_draft_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(FAMILY, "perfect")
    config = GenerationConfig(eos_token_id=_ends()[2], pad_token_id=PAD, do_sample=True)
    monkeypatch.setattr(draft, "generation_config", config)
    with _tight_runner("perfect", tmp_path) as runner:
        assert_exact(runner, target_of(FAMILY), _IDS, max_new_tokens=40)


def test_an_end_token_in_the_prompt_ends_nothing(tmp_path: Path) -> None:
    target = target_of(FAMILY)
    eos = next(i for i in _ROW if i not in _text())
    with _tight_runner("perfect", tmp_path) as runner:
        out = assert_exact(runner, target, _IDS, max_new_tokens=40, eos_token_id=eos)
        assert out.shape[1] == len(_ROW) + 40
        # As the last token of the prompt, where it would be the first one looked at.
        ids = torch.tensor([[*_ROW, eos]])
        assert_exact(runner, target, ids, max_new_tokens=12, eos_token_id=eos)


def test_an_end_token_as_the_first_new_one_needs_no_round(tmp_path: Path) -> None:
    target = target_of(FAMILY)
    eos = _text()[0]
    with _tight_runner("perfect", tmp_path) as runner:
        out = assert_exact(runner, target, _IDS, max_new_tokens=40, eos_token_id=eos)
        assert out.shape[1] == len(_ROW) + 1
        assert runner.report().rounds == 0


@pytest.mark.parametrize("kind", ["perfect", "noisy", "poor"])
def test_rows_of_a_batch_end_each_for_itself(kind: str, tmp_path: Path) -> None:
    """A row that ended is padded while the others go on, as plain generation does."""
    target = target_of(FAMILY)
    rows = [words(n, seed=n) for n in (1, 40, 5, 17)]
    ids, mask = pad_left(rows)
    alone = [
        plain_generate(target, torch.tensor([row]), max_new_tokens=30)[0, len(row) :].tolist()
        for row in rows
    ]
    ends = [alone[1][3], alone[3][6], alone[2][20]]
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": ends, "pad_token_id": 2}
    expected = plain_generate(target, ids, mask, **options)
    draft = draft_of(FAMILY, kind)
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(**_options(tmp_path))) as runner:
        out = runner.generate(ids, mask, **options)
        report = runner.report()
    assert out.shape == expected.shape
    width = ids.shape[1]
    for i, row in enumerate(rows):
        assert_same_tokens(target, row, out[i, width:], expected[i, width:], what=f"row {i}")
    num_new = sum(int((row[width:] != 2).sum()) for row in out)
    assert report.new_tokens == num_new
    assert len({int((row[width:] != 2).sum()) for row in out}) > 1, "all rows ended together"


def test_a_batch_that_ends_early_is_no_wider_than_it_needs(tmp_path: Path) -> None:
    target = target_of(FAMILY)
    row = words(12, seed=5)
    ids, mask = pad_left([row, row[3:]])
    texts = [
        plain_generate(target, torch.tensor([r]), max_new_tokens=12)[0, len(r) :]
        for r in (row, row[3:])
    ]
    eos = [int(texts[0][4]), int(texts[1][8])]
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": eos}
    expected = plain_generate(target, ids, mask, **options)
    draft = draft_of(FAMILY, "perfect")
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(**_options(tmp_path))) as runner:
        assert runner.generate(ids, mask, **options).equal(expected)


def test_without_a_mask_padding_is_recognised_as_transformers_does(tmp_path: Path) -> None:
    target = target_of(FAMILY)
    ids, mask = pad_left([words(5, seed=1), words(12, seed=2)])
    expected = plain_generate(target, ids, mask, max_new_tokens=9)
    draft = draft_of(FAMILY, "noisy")
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(**_options(tmp_path))) as runner:
        assert runner.generate(ids, max_new_tokens=9).equal(expected)


# Small numbers.


@pytest.mark.parametrize("gamma", [0, 1, 3, 16])
@pytest.mark.parametrize("kind", ["perfect", "noisy", "poor"])
def test_short_texts_have_their_exact_length(gamma: int, kind: str, tmp_path: Path) -> None:
    target, draft = target_of(FAMILY), draft_of(FAMILY, kind)
    ids = prompt(10, seed=2)
    with _tight_runner(kind, tmp_path, num_draft_tokens=gamma) as runner:
        for num_new in (1, 2, 3, 5, 9):
            with count_forwards(draft) as count:
                out = assert_exact(runner, target, ids, max_new_tokens=num_new)
            assert out.shape[1] == 10 + num_new
            report = runner.report()
            assert report.new_tokens == num_new
            if gamma == 0:
                assert count.total == 0, "plain decoding asked the draft"
                assert report.rounds == num_new - 1
            assert_exact(runner, target, ids, max_length=10 + num_new)


@pytest.mark.parametrize("num_prompt", [1, 2, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompts_around_the_end_of_a_block(
    num_prompt: int, gamma: int, family: str, tmp_path: Path
) -> None:
    with _tight_runner(
        "noisy", tmp_path, family, block_size=16, num_draft_tokens=gamma, prefill_chunk=512
    ) as runner:
        for num_new in (1, 16, 18):
            ids = prompt(num_prompt, seed=num_prompt)
            assert_exact(runner, target_of(family), ids, max_new_tokens=num_new)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 37, 512])
def test_the_prompt_may_be_read_in_pieces_of_any_size(chunk: int, tmp_path: Path) -> None:
    with _tight_runner("noisy", tmp_path, "gpt_oss", prefill_chunk=chunk) as runner:
        assert_exact(runner, target_of("gpt_oss"), prompt(37), max_new_tokens=12)


# One model in two roles, one runner for many calls, two runners for one model.


@pytest.mark.parametrize("tight", [False, True])
def test_a_model_may_draft_for_itself(tight: bool, tmp_path: Path) -> None:
    target = target_of(FAMILY)
    options = _options(tmp_path, num_draft_tokens=4)
    if tight:
        options["device_budget"] = minimum_budget(target, target, SpecOffloadConfig(**options))
    with (
        assert_clean(target),
        SpecOffloadRunner(target, target, SpecOffloadConfig(**options)) as runner,
    ):
        for seed in range(2):
            assert_exact(runner, target, prompt(30, seed=seed), max_new_tokens=21)
            report = runner.report()
            assert report.accepted_tokens == report.drafted_tokens


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    config = copy.deepcopy(target_of(FAMILY).config)
    config.tie_word_embeddings = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        target = type(target_of(FAMILY))(config).eval().requires_grad_(False)
    target.generation_config = copy.deepcopy(target_of(FAMILY).generation_config)
    draft = copy.deepcopy(target)
    draft.set_input_embeddings(target.get_input_embeddings())  # the pair shares one embedding
    pointers = [
        target.get_input_embeddings().weight.data_ptr(),
        target.get_output_embeddings().weight.data_ptr(),
        draft.get_input_embeddings().weight.data_ptr(),
    ]
    assert len(set(pointers)) == 1
    with SpecOffloadRunner(draft, target, SpecOffloadConfig(**_options(tmp_path))) as runner:
        assert_exact(runner, target, prompt(20), max_new_tokens=20)
    assert pointers == [
        target.get_input_embeddings().weight.data_ptr(),
        target.get_output_embeddings().weight.data_ptr(),
        draft.get_input_embeddings().weight.data_ptr(),
    ]


def test_a_runner_serves_many_calls(tmp_path: Path) -> None:
    """Long and short, alone and in batches: nothing of one call is left in the next."""
    target, draft = target_of("gemma3"), draft_of("gemma3", "noisy")
    options = _options(tmp_path)
    minimum = minimum_budget(draft, target, SpecOffloadConfig(**options))
    calls = [((70,), 20), ((3,), 9), ((5, 40, 18), 15), ((1,), 30), ((64, 64), 4), ((70,), 20)]
    with (
        assert_clean(draft, target, folders=[tmp_path]),
        SpecOffloadRunner(
            draft, target, SpecOffloadConfig(device_budget=minimum, **options)
        ) as runner,
    ):
        for seed, (lengths, num_new) in enumerate(calls):
            rows = [words(n, seed=seed + n) for n in lengths]
            ids, mask = pad_left(rows)
            out = runner.generate(ids, mask, max_new_tokens=num_new)
            for i, row in enumerate(rows):
                want = plain_generate(target, torch.tensor([row]), max_new_tokens=num_new)
                assert_same_tokens(
                    target, row, out[i, ids.shape[1] :], want[0, len(row) :], what=f"call {seed}"
                )
            report = runner.report()
            assert report.prompt_tokens == sum(lengths)
            assert report.new_tokens == num_new * len(lengths)
            assert report.blocks_written <= report.blocks_filled


def test_two_runners_may_share_a_target(tmp_path: Path) -> None:
    """Taking turns, in one folder; closing one leaves the other whole."""
    target = target_of(FAMILY)
    with assert_clean(target, folders=[tmp_path]):
        with _tight_runner("noisy", tmp_path) as first:
            with _tight_runner("poor", tmp_path, block_size=16, num_draft_tokens=3) as second:
                for seed in range(3):
                    assert_exact(first, target, prompt(25, seed=seed), max_new_tokens=12)
                    assert_exact(second, target, prompt(25, seed=seed), max_new_tokens=12)
            assert_exact(first, target, prompt(30, seed=9), max_new_tokens=12)
        with _tight_runner("perfect", tmp_path) as third:
            assert_exact(third, target, prompt(30, seed=9), max_new_tokens=12)


def test_runners_may_be_closed_in_any_order(tmp_path: Path) -> None:
    target = target_of(FAMILY)
    ids = prompt(25)
    expected = plain_generate(target, ids, max_new_tokens=10)
    options = SpecOffloadConfig(**_options(tmp_path))
    with assert_clean(target, draft_of(FAMILY, "noisy"), draft_of(FAMILY, "poor")):
        first = SpecOffloadRunner(draft_of(FAMILY, "noisy"), target, options)
        second = SpecOffloadRunner(draft_of(FAMILY, "poor"), target, options)
        assert_exact(first, target, ids, max_new_tokens=10, expected=expected)
        first.close()
        assert_exact(second, target, ids, max_new_tokens=10, expected=expected)
        second.close()
    assert plain_generate(target, ids, max_new_tokens=10).equal(expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_after_close_the_models_are_as_before(implementation: str, tmp_path: Path) -> None:
    target, draft = copy.deepcopy(target_of(FAMILY)), copy.deepcopy(draft_of(FAMILY, "noisy"))
    for model in (target, draft):
        model.set_attn_implementation(implementation)
    ids, mask = pad_left([words(9, seed=1), words(30, seed=2)])

    def logits(model: PreTrainedModel) -> torch.Tensor:
        with torch.inference_mode():
            return model(ids, attention_mask=mask).logits

    before = [logits(model) for model in (target, draft)]
    expected = plain_generate(target, ids, mask, max_new_tokens=15)
    configs = [copy.deepcopy(model.generation_config.to_dict()) for model in (target, draft)]
    with assert_clean(target, draft, folders=[tmp_path]):
        runner = SpecOffloadRunner(draft, target, SpecOffloadConfig(**_options(tmp_path)))
        assert runner.generate(ids, mask, max_new_tokens=15).equal(expected)
        runner.close()
    assert plain_generate(target, ids, mask, max_new_tokens=15).equal(expected)
    for model, old, config in zip((target, draft), before, configs, strict=True):
        assert model.config._attn_implementation == implementation
        assert logits(model).equal(old), "the model computes something else than before"
        assert model.generation_config.to_dict() == config


def test_the_target_works_by_itself_while_a_runner_is_open(tmp_path: Path) -> None:
    target = target_of("gemma3")
    ids, mask = pad_left([words(9, seed=1), words(30, seed=2)])
    expected = plain_generate(target, ids, mask, max_new_tokens=15)
    with _tight_runner("noisy", tmp_path, "gemma3") as runner:
        assert plain_generate(target, ids, mask, max_new_tokens=15).equal(expected)
        runner.generate(ids[1:], max_new_tokens=6)
        assert plain_generate(target, ids, mask, max_new_tokens=15).equal(expected)


def test_generating_draws_no_random_number_and_changes_no_argument(tmp_path: Path) -> None:
    ids, mask = pad_left([words(9, seed=1), words(30, seed=2)])
    given = ids.clone(), mask.clone()
    draft = draft_of(FAMILY, "noisy")
    with SpecOffloadRunner(
        draft, target_of(FAMILY), SpecOffloadConfig(**_options(tmp_path))
    ) as runner:
        state = torch.get_rng_state()
        out = runner.generate(ids, mask, max_new_tokens=15)
        assert torch.get_rng_state().equal(state)
        assert ids.equal(given[0])
        assert mask.equal(given[1])
        kept = out.clone()
        runner.generate(ids, mask, max_new_tokens=9)
        assert out.equal(kept), "the result changed when the runner was used again"
        assert not out.requires_grad


def test_gradients_are_not_recorded_and_the_mode_of_the_caller_stays(tmp_path: Path) -> None:
    with _tight_runner("noisy", tmp_path) as runner:
        with torch.enable_grad():
            runner.generate(prompt(9), max_new_tokens=4)
            assert torch.is_grad_enabled()
        with torch.no_grad():
            runner.generate(prompt(9), max_new_tokens=4)
            assert not torch.is_grad_enabled()


def test_an_open_runner_holds_no_named_file(tmp_path: Path) -> None:
    with _tight_runner("noisy", tmp_path) as runner:
        runner.generate(prompt(60), max_new_tokens=10)
        assert runner.report().disk_bytes > 0
        assert not list(tmp_path.iterdir())


# Streams.


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self, *, fail_at: int | None = None) -> None:
        self.ids: list[int] = []
        self.puts = 0
        self.ends = 0
        self.fail_at = fail_at

    def put(self, value: torch.Tensor) -> None:
        assert self.ends == 0, "put() after end()"
        assert value.device.type == "cpu"
        self.puts += 1
        if self.puts == self.fail_at:
            raise OSError("the reader went away")
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("kind", ["perfect", "noisy", "poor"])
@pytest.mark.parametrize("gamma", [0, 5])
def test_the_stream_is_what_is_returned(kind: str, gamma: int, tmp_path: Path) -> None:
    """The prompt first, as transformers does, then every committed token once and in order."""
    streamer = Recorder()
    with _tight_runner(kind, tmp_path, num_draft_tokens=gamma) as runner:
        out = runner.generate(_IDS, max_new_tokens=20, streamer=streamer)
    assert streamer.ids == out[0].tolist()
    assert streamer.ends == 1
    assert streamer.puts > 2, "everything came at once"


def test_a_stream_ends_also_when_generating_fails(tmp_path: Path) -> None:
    target = target_of(FAMILY)
    with _tight_runner("noisy", tmp_path) as runner:
        streamer = Recorder()
        with _failing(target, at=20), pytest.raises(StoppedError):
            runner.generate(_IDS, max_new_tokens=40, streamer=streamer)
        assert streamer.ends == 1
        assert streamer.ids == [*_ROW, *_text()][: len(streamer.ids)]
        assert_exact(runner, target, _IDS, max_new_tokens=10)


def test_a_stream_ends_also_when_the_call_is_refused(tmp_path: Path) -> None:
    """Whoever reads it in another thread waits for the end, whatever the reason."""
    with _tight_runner("noisy", tmp_path) as runner:
        streamer = Recorder()
        with pytest.raises(ValueError, match="max_new_tokens"):
            runner.generate(_IDS, max_new_tokens=0, streamer=streamer)
        assert streamer.ids == []
        assert streamer.ends == 1


@pytest.mark.parametrize("fail_at", [1, 2, 4])
def test_a_reader_that_fails_is_told_of_the_end(fail_at: int, tmp_path: Path) -> None:
    with _tight_runner("perfect", tmp_path) as runner:
        streamer = Recorder(fail_at=fail_at)
        with pytest.raises(OSError, match="went away"):
            runner.generate(_IDS, max_new_tokens=40, streamer=streamer)
        assert streamer.ends == 1
        assert_exact(runner, target_of(FAMILY), _IDS, max_new_tokens=10)


def test_the_streamers_of_transformers_work(tmp_path: Path) -> None:
    from transformers import TextIteratorStreamer

    class Letters:
        """As much of a tokenizer as a streamer needs: a token is a letter."""

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(chr(0x4E00 + i) for i in ids)

    streamer = TextIteratorStreamer(Letters(), skip_prompt=True)  # type: ignore[arg-type]
    with _tight_runner("noisy", tmp_path) as runner:
        out = runner.generate(_IDS, max_new_tokens=15, streamer=streamer)
    assert "".join(streamer) == Letters().decode(out[0, len(_ROW) :].tolist())


# Interruptions.


class StoppedError(RuntimeError):
    """Raised from inside a model."""


@contextmanager
def _failing(
    *models: PreTrainedModel, at: int, error: Callable[[], BaseException] = StoppedError
) -> Iterator[None]:
    """Raise at the `at`-th time that a layer of the models is done, counted from 1."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error()

    hooks = [layer.register_forward_hook(hook) for m in models for layer in m.model.layers]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@pytest.mark.parametrize(("kind", "error"), [("noisy", StoppedError), ("poor", KeyboardInterrupt)])
def test_after_an_interruption_the_next_call_is_right(
    kind: str, error: type[BaseException], tmp_path: Path
) -> None:
    """In the prefill, in a draft, in a verify, in any layer; the exception comes out as it was."""
    target, draft = target_of(FAMILY), draft_of(FAMILY, kind)
    ids = prompt(30, seed=4)
    expected = plain_generate(target, ids, max_new_tokens=12)
    kept = []
    with (
        assert_clean(draft, target, folders=[tmp_path]),
        _tight_runner(kind, tmp_path, num_draft_tokens=3) as runner,
    ):
        for at in (1, 2, 3, 4, 5, 7, 9, 10, 11, 12, 13, 14, 15, 18, 22, 31, 40):
            with _failing(draft, target, at=at, error=error), pytest.raises(error) as caught:
                runner.generate(ids, max_new_tokens=25)
            kept.append(caught)  # with its frames, as a notebook would keep it
            assert_exact(
                runner, target, ids, max_new_tokens=12, expected=expected, what=f"after {at}"
            )
            report = runner.report()
            assert report.blocks_written <= report.blocks_filled
            assert report.new_tokens == 12


def test_an_interrupted_batch_leaves_nothing_behind(tmp_path: Path) -> None:
    target, draft = target_of("gpt_oss"), draft_of("gpt_oss", "noisy")
    rows = [words(n, seed=n) for n in (20, 3, 41)]
    ids, mask = pad_left(rows)
    expected = plain_generate(target, ids, mask, max_new_tokens=9)
    with (
        assert_clean(draft, target, folders=[tmp_path]),
        _tight_runner("noisy", tmp_path, "gpt_oss", num_draft_tokens=3) as runner,
    ):
        for at in (2, 7, 13, 22, 37):
            with _failing(draft, target, at=at), pytest.raises(StoppedError):
                runner.generate(ids, mask, max_new_tokens=25)
            assert runner.generate(ids, mask, max_new_tokens=9).equal(expected)


def test_an_interrupted_runner_can_be_closed_at_once(tmp_path: Path) -> None:
    target, draft = target_of(FAMILY), draft_of(FAMILY, "noisy")
    with (
        assert_clean(draft, target, folders=[tmp_path]),
        pytest.raises(StoppedError),
        _failing(target, at=9),
        _tight_runner("noisy", tmp_path) as runner,
    ):
        runner.generate(prompt(40), max_new_tokens=25)
    assert plain_generate(target, _IDS, max_new_tokens=3).shape[1] == len(_ROW) + 3


def test_a_runner_that_was_never_used_leaves_nothing(tmp_path: Path) -> None:
    target, draft = target_of(FAMILY), draft_of(FAMILY, "noisy")
    with assert_clean(draft, target, folders=[tmp_path]):
        SpecOffloadRunner(draft, target, SpecOffloadConfig(**_options(tmp_path))).close()
