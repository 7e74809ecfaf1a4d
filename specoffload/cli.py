"""`python -m specoffload`: the commands and their options.

Knows arguments and exit codes. Refuses to load torch before a command needs it, so that `--help`
and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from specoffload import __version__
from specoffload.config import MAX_DRAFT_TOKENS, SpecOffloadConfig
from specoffload.errors import SpecOffloadError

if TYPE_CHECKING:
    import torch

    from specoffload.pairs import Pair

FAILED: Final = 1
"""A check did not pass."""

REFUSED: Final = 2
"""The request, or the machine, was not up to it; the reason is on stderr."""

INTERRUPTED: Final = 130
"""Stopped from the keyboard."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, `FAILED`, `REFUSED` or `INTERRUPTED`.

    Args:
        argv: the arguments, `sys.argv[1:]` by default.
    """
    args = build_parser().parse_args(argv)
    args.command_line = shlex.join(sys.argv[1:] if argv is None else argv)
    # On a busy machine, threads that spin while they wait take the cores from those they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        code: int = args.run(args)
    except BrokenPipeError:
        # Whoever read us has left: what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    except (SpecOffloadError, OSError) as error:
        print(f"specoffload: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command; parsing loads nothing heavy."""
    parser = argparse.ArgumentParser(
        prog="specoffload",
        description="Speculative decoding over a paged, tiered KV cache for Hugging Face models.",
        epilog="Start with `specoffload doctor`, which checks this machine in a few seconds.",
    )
    parser.add_argument("--version", action="version", version=f"specoffload {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_generate(commands)
    _add_bench(commands)
    _add_doctor(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "demo",
        help="decode a long real prompt and compare with transformers",
        description="Decode a long prompt with a pair while the device memory for its KV shrinks "
        "to a tenth, and compare tokens, speed and traffic with transformers.",
    )
    command.add_argument(
        "--pair",
        choices=("demo", "tiny"),
        default="demo",
        help="demo: SmolLM2-135M-Instruct and a 4-layer draft (default, minutes); "
        "tiny: the pair inside the package (seconds)",
    )
    command.add_argument(
        "--context", type=_positive, metavar="N", help="prompt tokens (4000; tiny: 514)"
    )
    command.add_argument(
        "--new-tokens", type=_positive, metavar="M", help="tokens to write (48; tiny: 64)"
    )
    command.set_defaults(run=_demo)


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "generate",
        help="write text with a pair",
        description="Write greedy text with a pair: the text goes to stdout as it comes, the "
        "report to stderr after it.",
    )
    _add_pair_options(command)
    prompt = command.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="what to continue")
    prompt.add_argument("--prompt-file", type=Path, metavar="F", help="a file that holds it")
    command.add_argument(
        "--max-new-tokens", type=_positive, default=128, metavar="M", help="default: %(default)s"
    )
    command.add_argument(
        "--device-budget",
        metavar="SIZE",
        help="KV of both models on the device, e.g. 512MiB (default: no limit)",
    )
    command.add_argument(
        "--host-budget",
        default="auto",
        metavar="SIZE",
        help="host memory for what left the device; auto: half of what is free (default)",
    )
    command.add_argument(
        "--disk", type=Path, metavar="DIR", help="folder for what fits neither (default: no disk)"
    )
    _add_run_options(command)
    command.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report there as well, as JSON"
    )
    command.set_defaults(run=_generate)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "bench",
        help="measure speed, traffic and identity at several budgets",
        description="Answer one prompt in turns with transformers and with every device budget, "
        "and print medians. Everybody is timed from outside in the same way, prefill apart.",
    )
    _add_pair_options(command)
    command.add_argument(
        "--prompt-file",
        type=Path,
        metavar="F",
        help="text to cut the prompt from (default: text that ships with Python)",
    )
    command.add_argument(
        "--context", type=_positive, default=2048, metavar="N", help="prompt tokens (2048)"
    )
    command.add_argument(
        "--new-tokens", type=_positive, default=64, metavar="M", help="tokens to write (64)"
    )
    command.add_argument(
        "--budgets",
        type=_percentages,
        default=(100.0, 50.0, 25.0, 10.0),
        metavar="P,P,...",
        help="device budgets in percent of all KV (100,50,25,10)",
    )
    command.add_argument(
        "--against",
        type=_names,
        default=("hf", "hf-assisted"),
        metavar="NAMES",
        help="transformers' own ways to run as well: hf, hf-assisted (both are the default), "
        "hf-offloaded (needs a GPU), or none",
    )
    command.add_argument(
        "--host-budget",
        default="0",
        metavar="SIZE",
        help="host memory for what left the device (default: 0, all of it goes to disk)",
    )
    command.add_argument(
        "--disk", type=Path, metavar="DIR", help="folder for the spill file (default: temporary)"
    )
    command.add_argument(
        "--repeats", type=_positive, default=3, metavar="R", help="turns (default: %(default)s)"
    )
    _add_run_options(command)
    command.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as JSON")
    command.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    command.set_defaults(run=_bench)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "doctor",
        help="check this machine",
        description="Say what this machine has and what will be used of it, and check that a small "
        "pair decodes exactly. Exit code 1 if a check fails.",
    )
    command.add_argument(
        "--disk", type=Path, metavar="DIR", help="folder to test (default: the temporary one)"
    )
    command.add_argument(
        "--faults",
        action="store_true",
        help="let the disk there go wrong on purpose, and check that every fault is reported",
    )
    command.set_defaults(run=_doctor)


def _add_pair_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--pair",
        choices=("demo", "tiny"),
        help="a pair that comes along; tiny is the default where no models are named",
    )
    command.add_argument("--draft", metavar="X", help="hub id or folder of the small model")
    command.add_argument(
        "--target", metavar="Y", help="hub id or folder of the model whose text is wanted"
    )
    command.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s"
    )


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--block-size", type=_positive, default=64, metavar="T", help="tokens of a block (64)"
    )
    command.add_argument(
        "--gamma",
        type=_gamma,
        default="auto",
        metavar="N",
        help=f"tokens drafted a round, 0 to {MAX_DRAFT_TOKENS}, or auto (default)",
    )
    command.add_argument(
        "--threads", type=_positive, metavar="T", help="torch threads (default: torch's own choice)"
    )


def _demo(args: argparse.Namespace) -> int:
    from specoffload.demo import run_demo

    _quiet()
    return run_demo(args.pair, context=args.context, new_tokens=args.new_tokens)


def _generate(args: argparse.Namespace) -> int:
    config = SpecOffloadConfig(
        device_budget=args.device_budget,
        host_budget=args.host_budget,
        disk_path=args.disk,
        block_size=args.block_size,
        num_draft_tokens=args.gamma,
    )
    text = _read(args.prompt_file) if args.prompt_file else args.prompt
    from specoffload.bench import prompt_for
    from specoffload.console import Progress, text_printer, watch_reading
    from specoffload.runner import SpecOffloadRunner

    pair = _load(args)
    if text is None and pair.tokenizer is not None:
        raise SpecOffloadError("nothing to continue: give --prompt TEXT or --prompt-file F")
    progress = Progress()
    ids = prompt_for(pair, args.max_new_tokens, text=text)
    with (
        SpecOffloadRunner(pair.draft, pair.target, config) as runner,
        watch_reading(pair.target, ids.shape[1], progress),
    ):
        runner.generate(
            ids,
            max_new_tokens=args.max_new_tokens,
            streamer=text_printer(pair.tokenizer, progress),
        )
        report = runner.report()
    progress.line(str(report))
    if args.json:
        args.json.write_text(report.to_json() + "\n", encoding="utf-8")
    return 0


def _bench(args: argparse.Namespace) -> int:
    from specoffload.bench import BenchOptions, prompt_for, run_bench
    from specoffload.bench_result import describe_machine
    from specoffload.console import Progress
    from specoffload.contenders import Request

    options = BenchOptions(
        budgets=args.budgets,
        against=args.against,
        num_draft_tokens=args.gamma,
        block_size=args.block_size,
        host_budget=args.host_budget,
        disk=args.disk,
        repeats=args.repeats,
    )
    text = _read(args.prompt_file) if args.prompt_file else None
    pair = _load(args)
    ids = prompt_for(pair, args.new_tokens, context=args.context, text=text)
    request = Request(pair=pair, ids=ids, new_tokens=args.new_tokens)
    result = run_bench(request, options, progress=Progress())
    print(result.markdown() if args.markdown else result.table())
    print(f"\n{describe_machine()}, {args.dtype}\npython -m specoffload {args.command_line}")
    if args.json:
        args.json.write_text(result.to_json(), encoding="utf-8")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from specoffload.doctor import run_doctor

    _quiet()
    return run_doctor(disk=args.disk, faults=args.faults)


def _load(args: argparse.Namespace) -> Pair:
    if (args.draft is None) != (args.target is None):
        raise SpecOffloadError("--draft and --target come together: name both models")
    if args.pair and args.draft:
        raise SpecOffloadError("--pair names both models already: leave out --draft and --target")
    import torch

    from specoffload.pairs import load_hub_pair, load_pair

    _quiet()
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype: torch.dtype = getattr(torch, args.dtype)
    if args.draft:
        return load_hub_pair(args.draft, args.target, dtype=dtype)
    return load_pair(args.pair or "tiny", dtype=dtype)


def _quiet() -> None:
    """Keep transformers' progress bars for weights off a screen that has its own progress line."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecOffloadError(f"{path} is not UTF-8 text: {error.reason}") from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _gamma(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor 'auto'")
    return text if text == "auto" else int(text)


def _percentages(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 100,50,25,10") from None


def _names(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(text.split(","))
