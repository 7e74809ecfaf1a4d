"""Lets several ways to answer one request take turns, and tells what each of them cost.

Knows turns and medians. Refuses to know how an answer is made or timed.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, get_args

import torch
from transformers.generation.streamers import BaseStreamer

from specoffload.bench_result import BenchResult, BenchRun
from specoffload.config import SpecOffloadConfig
from specoffload.console import Progress, ProgressStreamer, watch_reading
from specoffload.contenders import Assisted, Contender, Offloaded, Plain, Request, Sample
from specoffload.errors import BudgetError, ConfigError, SpecOffloadError
from specoffload.pairs import Pair
from specoffload.prompts import demo_prompt
from specoffload.recall_task import NUM_KEYS, recall_prompt
from specoffload.report import RunReport

Baseline = Literal["hf", "hf-assisted", "hf-offloaded"]
BASELINES: Final[tuple[Baseline, ...]] = get_args(Baseline)

TINY_SLOT: Final = 8
"""Tokens per table entry that the tiny pair knows best."""

TINY_CONTEXT: Final = NUM_KEYS * TINY_SLOT + 2
"""Its prompt with a full table: the start, 64 entries, the first question."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Who competes, and how often.

    Attributes:
        budgets: device budgets of our runs, in percent of the bytes that all KV takes.
        against: which of transformers' own ways run as well.
        num_draft_tokens: gamma; an int binds transformers' assisted generation too, "auto" leaves
            each its own rule.
        block_size: tokens of one block.
        prefill_chunk: most prompt tokens of one of our forward passes.
        host_budget: bytes of the host tier; 0 sends everything that leaves the device to disk.
        disk: folder for the spill file; None: a temporary one.
        repeats: turns; medians over them are reported.
    """

    budgets: tuple[float, ...] = (100, 50, 25, 10)
    against: tuple[Baseline, ...] = ("hf", "hf-assisted")
    num_draft_tokens: int | Literal["auto"] = "auto"
    block_size: int = 64
    prefill_chunk: int = 512
    host_budget: int | str = 0
    disk: Path | None = None
    repeats: int = 3

    def __post_init__(self) -> None:
        if not self.budgets or not all(0 < budget <= 100 for budget in self.budgets):
            raise ConfigError(f"budgets {self.budgets} must be percentages above 0, at most 100")
        for name in self.against:
            if name not in BASELINES:
                raise ConfigError(
                    f"against {name!r} is unknown: choose from {', '.join(BASELINES)}"
                )
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats} must be at least 1")


def run_bench(
    request: Request,
    options: BenchOptions,
    *,
    progress: Progress,
    printer: BaseStreamer | None = None,
) -> BenchResult:
    """Answer `request` once a turn with every contender.

    The first answer is ours with room for all KV: its report tells the bytes that budgets are
    percentages of.

    Args:
        request: the prompt and how much to write.
        options: who competes.
        progress: told what runs.
        printer: shown the tokens of the first answer.

    Raises:
        SpecOffloadError: a budget is below one working set; the message says which would do.
        OSError: the spill file cannot be written.
    """
    with _spill_folder(options.disk) as folder:
        config = SpecOffloadConfig(
            host_budget=options.host_budget,
            disk_path=folder,
            block_size=options.block_size,
            num_draft_tokens=options.num_draft_tokens,
            prefill_chunk=options.prefill_chunk,
        )
        baselines = [_baseline(name, request, options) for name in options.against]
        roomy = Offloaded(name="specoffload-100", config=config)
        _warm_up([*baselines, roomy], request)

        first = _turn(roomy, request, progress, printer)
        assert first.report is not None
        kv_bytes = first.report.kv_bytes
        ours = [
            roomy
            if percent == 100
            else Offloaded(
                name=f"specoffload-{percent:g}",
                config=replace(config, device_budget=int(kv_bytes * percent / 100)),
            )
            for percent in dict.fromkeys(options.budgets)
        ]
        samples: dict[str, list[Sample]] = {c.name: [] for c in [*baselines, *ours]}
        pending = {roomy.name: first}
        # The target alone says which tokens are right, whatever cache it keeps.
        judge = next((name for name in ("hf", "hf-offloaded") if name in options.against), None)
        reference: tuple[int, ...] | None = None
        if judge is None:
            reference = _turn(Plain(), request, progress).tokens
        for _ in range(options.repeats):
            for contender in [*baselines, *ours]:
                sample = pending.pop(contender.name, None)
                if sample is None:
                    sample = _turn(contender, request, progress, kv_bytes=kv_bytes)
                samples[contender.name].append(sample)
    if reference is None:
        assert judge is not None
        reference = samples[judge][0].tokens
    runs = tuple(
        _row(contender, samples[contender.name], reference, request, options, kv_bytes)
        for contender in [*baselines, *ours]
    )
    smallest = min(ours, key=lambda contender: contender.config.device_budget_bytes or kv_bytes)
    report = samples[smallest.name][-1].report
    assert report is not None
    return BenchResult(runs=runs, report=report)


def _baseline(name: Baseline, request: Request, options: BenchOptions) -> Contender:
    if name == "hf-assisted":
        return Assisted(num_draft_tokens=options.num_draft_tokens)
    if name == "hf-offloaded":
        if request.pair.target.device.type == "cpu":
            raise SpecOffloadError(
                "hf-offloaded needs a GPU, and the target lies on the CPU: leave it out of against"
            )
        return Plain(name=name, cache_implementation="offloaded")
    return Plain()


def prompt_for(
    pair: Pair, new_tokens: int, *, context: int | None = None, text: str | None = None
) -> torch.Tensor:
    """Return a prompt `[1, n]` for `pair`.

    Args:
        pair: whose tokenizer is used; the tiny pair, which has none, gets a prompt of its own task.
        new_tokens: tokens that will be asked for.
        context: n; for the tiny pair, the most that n may be. None: all of `text`, or what the tiny
            pair was trained on.
        text: what to continue, cut to `context`; None: text that ships with Python.

    Raises:
        SpecOffloadError: the pair cannot read text, or `text` is too short or empty.
    """
    if pair.tokenizer is None:
        if text is not None:
            raise SpecOffloadError(
                f"the {pair.name} pair reads no text, only its own task: leave the prompt out"
            )
        return _recall_ids(TINY_CONTEXT if context is None else context, new_tokens)
    if text is None:
        return demo_prompt(pair.tokenizer, 2048 if context is None else context)
    ids = torch.tensor([pair.tokenizer(text)["input_ids"]], dtype=torch.int64)
    num_tokens = ids.shape[1]
    if not num_tokens:
        raise SpecOffloadError("the prompt is empty: give some text")
    if context is not None and num_tokens < context:
        raise SpecOffloadError(
            f"the prompt has {num_tokens} tokens, fewer than the context of {context}: give a "
            "longer text or a smaller context"
        )
    return ids[:, :context]


def _recall_ids(context: int, new_tokens: int) -> torch.Tensor:
    """The longest table that leaves the prompt at most `context` tokens long."""
    num_entries = min(NUM_KEYS, (context - 2) // TINY_SLOT)
    if num_entries < 1:
        raise SpecOffloadError(
            f"a context of {context} tokens holds no entry of the tiny pair's task: give at least "
            f"{TINY_SLOT + 2}"
        )
    slot = (context - 2) // num_entries
    prompt = recall_prompt(num_entries, slot, num_queries=(new_tokens + 1) // 2)
    return torch.from_numpy(prompt.ids[: prompt.prompt_length])[None]


@contextlib.contextmanager
def _spill_folder(disk: Path | None) -> Iterator[Path]:
    if disk is not None:
        yield disk
        return
    with tempfile.TemporaryDirectory(prefix="specoffload-") as folder:
        yield Path(folder)


def _warm_up(contenders: Iterable[Contender], request: Request) -> None:
    """Let everybody pay once for what only the first call costs."""
    short = replace(request, ids=request.ids[:, :16], new_tokens=4)
    for contender in contenders:
        contender.run(short)


def _turn(
    contender: Contender,
    request: Request,
    progress: Progress,
    printer: BaseStreamer | None = None,
    *,
    kv_bytes: int = 0,
) -> Sample:
    gc.collect()
    sink = printer or ProgressStreamer(progress, contender.name, request.new_tokens)
    with watch_reading(request.pair.target, request.context, progress):
        try:
            sample = contender.run(request, [sink])
        except BudgetError as error:
            assert kv_bytes, "without a limit no budget is too small"
            raise SpecOffloadError(
                f"{contender.name}: {error}; that is "
                f"{100 * error.required_bytes / kv_bytes:.0f}% of the KV: ask for a larger budget, "
                "a longer context or smaller blocks"
            ) from error
    rate = "-" if sample.tokens_per_s is None else f"{sample.tokens_per_s:.1f}"
    progress.line(
        f"{contender.name}: read in {sample.prefill_s:.1f} s, then {len(sample.tokens)} tokens "
        f"at {rate} tokens/s"
    )
    return sample


def _row(
    contender: Contender,
    samples: Sequence[Sample],
    reference: tuple[int, ...],
    request: Request,
    options: BenchOptions,
    kv_bytes: int,
) -> BenchRun:
    def median(measure: Callable[[Sample], float | None]) -> float | None:
        values = [value for sample in samples if (value := measure(sample)) is not None]
        return statistics.median(values) if values else None

    def report_median(measure: Callable[[RunReport], float]) -> float:
        values = [measure(sample.report) for sample in samples if sample.report is not None]
        return statistics.median(values) if values else 0

    budget = kv_bytes if isinstance(contender, Offloaded) else None
    fraction = 1.0 if budget else None
    if isinstance(contender, Offloaded) and contender.config.device_budget_bytes is not None:
        budget = contender.config.device_budget_bytes
        fraction = float(contender.name.removeprefix("specoffload-")) / 100
    differences = [_first_difference(sample.tokens, reference) for sample in samples]
    found = [index for index in differences if index is not None]
    return BenchRun(
        name=contender.name,
        budget_fraction=fraction,
        device_budget_bytes=budget,
        peak_device_bytes=max(sample.peak_device_bytes for sample in samples),
        identical=not found,
        tokens_per_s=median(lambda sample: sample.tokens_per_s),
        tokens_per_verify=median(lambda sample: sample.tokens_per_verify),
        acceptance=median(lambda sample: sample.acceptance),
        bytes_up=int(report_median(lambda report: report.bytes_up)),
        bytes_down=int(report_median(lambda report: report.bytes_down)),
        stall_s=report_median(lambda report: report.stall_s),
        prefill_s=statistics.median(sample.prefill_s for sample in samples),
        first_difference=min(found, default=None),
        new_tokens=len(samples[0].tokens),
        context=request.context,
        dtype=str(request.pair.target.dtype).removeprefix("torch."),
        num_draft_tokens=options.num_draft_tokens,
        block_size=options.block_size,
        repeats=len(samples),
        threads=torch.get_num_threads(),
    )


def _first_difference(tokens: tuple[int, ...], reference: tuple[int, ...]) -> int | None:
    if tokens == reference:
        return None
    pairs = enumerate(zip(tokens, reference, strict=False))
    shorter = min(len(tokens), len(reference))
    return next((index for index, (ours, plain) in pairs if ours != plain), shorter)
