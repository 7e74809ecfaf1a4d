"""A long real prompt, decoded under shrinking budgets, next to transformers' own ways.

Knows what is worth showing a newcomer, and in what order. Refuses to know how it is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from specoffload.bench import TINY_CONTEXT, BenchOptions, prompt_for, run_bench
from specoffload.bench_result import describe_machine
from specoffload.console import Progress, text_printer
from specoffload.contenders import Request
from specoffload.pairs import load_pair
from specoffload.report import BlockShare


@dataclass(frozen=True, kw_only=True)
class _Scene:
    """What a pair shows by default."""

    context: int
    new_tokens: int
    block_size: int
    story: str


_SCENES: Final = {
    "demo": _Scene(
        context=4000,
        new_tokens=48,
        block_size=64,
        story="SmolLM2-135M-Instruct summarises Python's own reference; a 4-layer draft proposes.",
    ),
    "tiny": _Scene(
        context=TINY_CONTEXT,
        new_tokens=64,
        block_size=16,
        story="A table of 64 entries far back, then questions: each answer needs one entry of it.",
    ),
}


def run_demo(
    pair_name: Literal["demo", "tiny"], *, context: int | None = None, new_tokens: int | None = None
) -> int:
    """Show the pair's text as it comes, then the table; return the exit code.

    Args:
        pair_name: which pair.
        context: prompt tokens; None: what fits into a few minutes.
        new_tokens: the same for tokens to write.

    Returns:
        0 if every row has the tokens of plain `target.generate`, else 1.

    Raises:
        SpecOffloadError: the pair is not on this machine; the message has the command that gets it.
        OSError: the spill file cannot be written.
    """
    start_s = time.perf_counter()
    scene = _SCENES[pair_name]
    progress = Progress()
    progress.update("loading the models")
    pair = load_pair(pair_name)
    new_tokens = new_tokens or scene.new_tokens
    ids = prompt_for(pair, new_tokens, context=context or scene.context)
    request = Request(pair=pair, ids=ids, new_tokens=new_tokens)
    progress.line(f"{scene.story}\n{ids.shape[1]} tokens of prompt, {new_tokens} new ones:\n")
    result = run_bench(
        request,
        BenchOptions(block_size=scene.block_size, repeats=1),
        progress=progress,
        printer=text_printer(pair.tokenizer, progress),
    )
    print(f"\n{result.table()}\n")
    if result.report.focus:
        print(f"Where the target looked last: {_focus(result.report.focus)}.")
    elapsed_s = time.perf_counter() - start_s
    print(f"{describe_machine()}, float32; {elapsed_s:.0f} s in all, one turn each.")
    exact = all(run.identical for run in result.runs)
    if not exact:
        print("Some rows differ from plain generation: this should not happen.", file=sys.stderr)
    return 0 if exact else 1


def _focus(shares: Sequence[BlockShare]) -> str:
    return ", ".join(
        f"layer {share.layer} at block {share.block} ({share.mass:.0%})" for share in shares[:4]
    )
