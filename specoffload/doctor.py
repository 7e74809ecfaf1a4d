"""What this machine has, what will be used of it, and whether it computes right.

Knows where to look. Refuses to repair anything.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch

import specoffload_kernels
from specoffload.bench import TINY_CONTEXT, prompt_for
from specoffload.bench_result import processor
from specoffload.config import SpecOffloadConfig, format_bytes
from specoffload.errors import SpecOffloadError
from specoffload.pairs import demo_unavailable_reason, load_pair
from specoffload.runner import SpecOffloadRunner
from specoffload.tiers.disk import SpillFile, direct_io_problem
from specoffload.tiers.fault_check import check_faults
from specoffload.tiers.ram import allocate

_PACKAGES: Final = ("torch", "transformers", "accelerate", "numpy", "triton")
_CPU_FEATURES: Final = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")
_BLOCK_BYTES: Final = 1 << 20
_SELF_CHECK_TOKENS: Final = 32


class Verdict(Enum):
    """What a finding means for the user."""

    FINE = "ok"
    NOTE = "--"
    BROKEN = "FAIL"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the examination."""

    topic: str
    text: str
    verdict: Verdict = Verdict.FINE


def run_doctor(*, disk: Path | None = None, faults: bool = False) -> int:
    """Print what was found as it is found; return 1 if a check failed, else 0.

    Args:
        disk: where a spill file would lie; the folder for temporary files if None.
        faults: let the disk go wrong there, in every way that is known, and see what comes of it.
    """
    broken = False
    for finding in _examine(disk or Path(tempfile.gettempdir()), faults=faults):
        print(f"{finding.verdict.value:<6}{finding.topic:<14}{finding.text}", flush=True)
        broken |= finding.verdict is Verdict.BROKEN
    return 1 if broken else 0


def _examine(disk: Path, *, faults: bool) -> Iterator[Finding]:
    yield Finding(topic="python", text=f"{platform.python_version()} on {platform.platform()}")
    for package in _PACKAGES:
        yield _version(package)
    yield _cpu()
    yield _accelerator()
    yield _memory()
    yield _kernel()
    yield from _operations()
    yield _disk(disk)
    if faults:
        yield from _faults(disk)
    yield _demo_pair()
    yield _self_check()


def _version(package: str) -> Finding:
    try:
        return Finding(topic=package, text=importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Finding(topic=package, text="not installed", verdict=Verdict.NOTE)


def _cpu() -> Finding:
    with contextlib.suppress(OSError):
        flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text(encoding="utf-8")))
        features = [name for name in _CPU_FEATURES if name in flags]
        return Finding(topic="cpu", text=f"{_cpu_counts()}, {' '.join(features) or 'no vectors'}")
    return Finding(topic="cpu", text=_cpu_counts())


def _cpu_counts() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, {usable} cores for us, {torch.get_num_threads()} torch threads"


def _accelerator() -> Finding:
    if not torch.cuda.is_available():
        return Finding(
            topic="gpu",
            text="none that torch sees: the device tier is a RAM arena",
            verdict=Verdict.NOTE,
        )
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding(topic="gpu", text=", ".join(names))


def _memory() -> Finding:
    meminfo = dict(
        re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    )
    total, available = (int(meminfo[key]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit = _container_limit()
    text = f"{format_bytes(available)} available of {format_bytes(total)}, container limit "
    return Finding(topic="memory", text=text + ("none" if limit is None else format_bytes(limit)))


def _container_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError):
            text = Path(path).read_text(encoding="utf-8").strip()
            # Version 1 writes a number beyond all memory where there is no limit.
            return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None


def _kernel() -> Finding:
    about = specoffload_kernels.describe()
    name = about.pop("backend")
    return Finding(
        topic="attention",
        text=f"{name} (" + ", ".join(f"{key}: {value}" for key, value in about.items()) + ")",
    )


def _operations() -> Iterator[Finding]:
    """Say which path each operation of the kernels takes on each device."""
    for device, path_of in specoffload_kernels.operation_paths().items():
        served: dict[str, list[str]] = {}
        for name, path in path_of.items():
            served.setdefault(path, []).append(name)
        text = "; ".join(f"{path}: {', '.join(names)}" for path, names in served.items())
        yield Finding(topic=f"kernels {device}", text=text)


def _disk(folder: Path) -> Finding:
    """Write a block there and read it back through a spill file."""
    block, found = allocate(_BLOCK_BYTES).numpy(), allocate(_BLOCK_BYTES).numpy()
    block[:] = np.frombuffer(os.urandom(_BLOCK_BYTES), np.uint8)
    try:
        problem = direct_io_problem(folder)
        spill = SpillFile(folder, _BLOCK_BYTES, 1, direct=problem is None)
        with contextlib.closing(spill):
            spill.write(np.array([0], np.int32), [block])
            spill.read(np.array([0], np.int32), [found])
        stats = os.statvfs(folder)
    except OSError as error:
        return Finding(topic="disk", text=f"{folder}: {error}", verdict=Verdict.BROKEN)
    free = format_bytes(stats.f_bavail * stats.f_frsize)
    direct = (
        "direct I/O works" if problem is None else f"no direct I/O, buffered instead ({problem})"
    )
    return Finding(topic="disk", text=f"{folder}: written and read back, {free} free, {direct}")


def _faults(folder: Path) -> Iterator[Finding]:
    try:
        for name, problem in check_faults(folder):
            yield Finding(
                topic="disk fault",
                text=f"{name}: " + ("handled" if problem is None else problem),
                verdict=Verdict.FINE if problem is None else Verdict.BROKEN,
            )
    except OSError as error:
        yield Finding(topic="disk fault", text=f"{folder}: {error}", verdict=Verdict.BROKEN)


def _demo_pair() -> Finding:
    reason = demo_unavailable_reason()
    if reason is None:
        return Finding(topic="demo pair", text="here")
    return Finding(topic="demo pair", text=reason, verdict=Verdict.NOTE)


def _self_check() -> Finding:
    """Decode with the tiny pair in the least device memory that works, and compare."""
    pair = load_pair("tiny")
    ids = prompt_for(pair, _SELF_CHECK_TOKENS, context=TINY_CONTEXT)
    plain = cast(Any, pair.target).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_SELF_CHECK_TOKENS,
        do_sample=False,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="specoffload-") as folder:
            config = SpecOffloadConfig(
                host_budget=0, disk_path=folder, block_size=16, num_draft_tokens=4
            )
            with SpecOffloadRunner(pair.draft, pair.target, config) as runner:
                least = runner.minimum_device_bytes
            config = replace(config, device_budget=least)
            with SpecOffloadRunner(pair.draft, pair.target, config) as runner:
                out = runner.generate(ids, max_new_tokens=_SELF_CHECK_TOKENS)
                report = runner.report()
    except (SpecOffloadError, OSError) as error:
        return Finding(topic="self check", text=str(error), verdict=Verdict.BROKEN)
    how = (
        f"{report.device_bytes / report.kv_bytes:.0%} of the KV on the device, "
        f"{format_bytes(report.bytes_up)} moved up, "
        f"{report.tokens_per_verify or 0:.1f} tokens per verify"
    )
    if not torch.equal(out, plain):
        return Finding(
            topic="self check",
            text=f"the tiny pair's tokens differ from plain generation ({how})",
            verdict=Verdict.BROKEN,
        )
    return Finding(topic="self check", text=f"tokens identical to plain generation ({how})")
