"""The Triton kernels compile for GPUs that are not here, without spills and with wide loads.

A choice of the variants, so that it stays cheap: `make kernels-report` compiles each for every kind
of GPU. Nothing runs on a GPU.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from specoffload_kernels import aot
from specoffload_kernels.aot import TARGETS, Compiled, Target, Variant, compile_variant
from specoffload_kernels.variants import variants

PACKAGE = Path(aot.__file__).parent


SPLITS = {
    "sm_80": (
        "bf16 D 128 T 64 G 4 prefill",
        "bf16 D 64 T 64 G 8 verify, window",
        "fp32 D 256 T 64 G 4 prefill",
        "bf16 D 128 T 16 G 4 verify",
    ),
    "sm_90": (
        "bf16 D 128 T 64 G 4 decode",
        "bf16 D 80 T 64 G 4 verify",
        "bf16 D 256 T 64 G 2 prefill, window, softcap",
        "fp32 D 128 T 64 G 4 verify, window, softcap",
    ),
    "sm_100": (
        "bf16 D 128 T 64 G 4 verify",
        "bf16 D 256 T 64 G 4 decode",
        "fp16 D 128 T 64 G 4 prefill",
        "bf16 D 128 T 256 G 4 decode",
    ),
    "gfx942": (
        "bf16 D 128 T 64 G 4 decode, no sums",
        "bf16 D 128 T 64 G 4 prefill",
        "bf16 D 256 T 64 G 2 verify, softcap",
        "fp32 D 80 T 64 G 4 decode",
    ),
}
"""What of the largest kernel is compiled here, by target; the others are dealt out in turn."""


def chosen() -> list[object]:
    calls = []
    for turn, (name, labels) in enumerate(SPLITS.items()):
        of_all = variants(TARGETS[name])
        splits = {v.label: v for v in of_all if v.kernel.__name__ == "split_kernel"}
        others = [v for v in of_all if v.kernel.__name__ != "split_kernel"]
        for variant in [*(splits[label] for label in labels), *others[turn :: len(TARGETS)]]:
            label = f"{variant.kernel.__name__}, {variant.label}, {name}"
            calls.append(pytest.param(variant, TARGETS[name], id=label))
    return calls


@pytest.mark.parametrize(("variant", "target"), chosen())
def test_compiles_without_faults(variant: Variant, target: Target) -> None:
    compiled = compile_variant(variant, target)
    assert compiled.faults(variant, target) == []
    assert compiled.registers > 0
    if variant.kernel.__name__ == "split_kernel" and target.vendor == "cuda":
        # A pipeline: K and V are on their way into shared memory while the step before computes.
        assert "cp.async.cg.shared.global" in compiled.assembly
        assert "cp.async.wait_group" in compiled.assembly


def test_no_kernel_is_forgotten() -> None:
    sources = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*triton*.py"))
    kernels = {
        name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.M)
    }
    for target in TARGETS.values():
        assert {variant.kernel.__name__ for variant in variants(target)} == kernels


def test_misaligned_strides_are_found() -> None:
    """Without known alignment the compiler falls back to small loads, and the check says so."""
    target = TARGETS["sm_90"]
    variant = next(v for v in variants(target) if v.kernel.__name__ == "split_kernel")
    compiled = compile_variant(dataclasses.replace(variant, aligned=frozenset()), target)
    assert any("less than 16 bytes" in fault for fault in compiled.faults(variant, target))


def test_spills_are_found() -> None:
    """A tile of 64 rows does not fit the registers of one warp."""
    target = TARGETS["sm_80"]
    variant = next(v for v in variants(target) if "bf16 D 128 T 64 G 4 prefill" in v.label)
    narrow = dataclasses.replace(variant, options={**variant.options, "num_warps": 1})
    faults = compile_variant(narrow, target).faults(narrow, target)
    assert any("spilled" in fault for fault in faults)


def test_limits_are_judged() -> None:
    target = TARGETS["gfx942"]
    variant = next(v for v in variants(target) if v.kernel.__name__ == "split_kernel")
    bad = Compiled(
        assembly="",
        registers=255,
        spilled_bytes=8,
        scalar_spills=0,
        shared_bytes=65_537,
        wide_loads=0,
        narrow_loads=0,
    )
    assert len(bad.faults(variant, target)) == 3


@pytest.mark.parametrize("kernel", ["present_kernel", "copy_kernel"])
@pytest.mark.parametrize(("target", "stop"), [("sm_90", "__assertfail"), ("gfx942", "s_trap")])
def test_an_unknown_slot_stops_the_device(kernel: str, target: str, stop: str) -> None:
    """The check that the interpreter's test covers is in the compiled code, too."""
    compiled = {v.kernel.__name__: v for v in variants(TARGETS[target])}
    assert stop in compile_variant(compiled[kernel], TARGETS[target]).assembly
