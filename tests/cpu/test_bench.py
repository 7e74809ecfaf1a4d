"""How contenders are timed and counted, and how a person is kept informed."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from specoffload import Pair, SpecOffloadConfig, load_pair
from specoffload.bench import prompt_for
from specoffload.console import Progress, ProgressStreamer, Stopwatch, watch_reading
from specoffload.contenders import Assisted, Offloaded, Plain, Request

GAMMA = 4


@pytest.fixture(scope="module")
def request_with_perfect_draft() -> Request:
    """The tiny target drafts for itself: every draft is accepted, so every count is known."""
    pair = load_pair("tiny")
    twin = Pair(name="twins", draft=copy.deepcopy(pair.target), target=pair.target, tokenizer=None)
    return Request(pair=twin, ids=prompt_for(twin, 21, context=130), new_tokens=21)


def test_plain_generation_needs_one_pass_a_token(request_with_perfect_draft: Request) -> None:
    sample = Plain().run(request_with_perfect_draft)
    assert len(sample.tokens) == 21
    assert sample.tokens_per_verify == 1
    assert sample.acceptance is None
    # The last token is never fed back: 150 tokens of K and V, 4 layers, 2 heads of 32, float32.
    assert sample.peak_device_bytes == 150 * 2 * 4 * 2 * 32 * 4


def test_assisted_generation_is_counted_from_outside(request_with_perfect_draft: Request) -> None:
    sample = Assisted(num_draft_tokens=GAMMA).run(request_with_perfect_draft)
    assert sample.tokens == Plain().run(request_with_perfect_draft).tokens
    # 5 tokens from each of 4 passes, then a last one with no room for a draft.
    assert sample.tokens_per_verify == 21 / 5
    assert sample.acceptance == 1


def test_assisted_generation_leaves_the_drafts_settings_alone(
    request_with_perfect_draft: Request,
) -> None:
    draft = request_with_perfect_draft.pair.draft
    before = draft.generation_config.to_dict()
    Assisted(num_draft_tokens=GAMMA).run(request_with_perfect_draft)
    assert draft.generation_config.to_dict() == before
    assert not draft._forward_hooks
    assert not request_with_perfect_draft.pair.target._forward_hooks


def test_ours_is_timed_by_the_same_clock(request_with_perfect_draft: Request) -> None:
    config = SpecOffloadConfig(block_size=16, num_draft_tokens=GAMMA)
    sample = Offloaded(name="ours", config=config).run(request_with_perfect_draft)
    assert sample.tokens == Plain().run(request_with_perfect_draft).tokens
    assert sample.report is not None
    # The first token comes from the prefill; the other 20 take 4 full rounds.
    assert sample.tokens_per_verify == 5
    assert sample.acceptance == 1
    # Our own account begins later and ends earlier than a clock outside.
    assert 0 < sample.tokens_per_s <= sample.report.tokens_per_s
    assert sample.prefill_s > 0


def test_a_stopwatch_sets_the_first_arrival_apart_and_passes_all_on() -> None:
    seen = Stopwatch()
    watch = Stopwatch([seen])
    watch.put(torch.zeros(1, 7))
    assert watch.first_s is None
    watch.put(torch.zeros(1, 3))
    watch.put(torch.zeros(1))
    watch.end()
    for clock in (watch, seen):
        assert (clock.num_first, clock.num_tokens) == (3, 4)
        assert clock.first_s is not None


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_rewrites_its_line_on_a_terminal_only() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        progress = Progress(stream)
        streamer = ProgressStreamer(progress, "hf", 8)
        streamer.put(torch.zeros(1, 7))
        streamer.put(torch.zeros(1))
        streamer.put(torch.zeros(1))
        streamer.end()
        progress.line("done")
    assert "\rhf: 2 of 8 tokens, " in terminal.getvalue()
    assert terminal.getvalue().endswith("\rdone\n")
    assert file.getvalue() == "done\n"


def test_reading_is_shown_while_it_lasts_and_leaves_no_hook() -> None:
    pair = load_pair("tiny")
    terminal = Terminal()
    with watch_reading(pair.target, 10, Progress(terminal)):
        for num_tokens in (6, 6, 1):
            pair.target(torch.zeros(1, num_tokens, dtype=torch.long))
    assert "6 of 10 tokens" in terminal.getvalue()
    assert "10 of 10 tokens" in terminal.getvalue()
    assert not pair.target.get_input_embeddings()._forward_pre_hooks
