"""Compiles kernels for GPUs that are not here, and counts what became of them.

Knows compilers and their listings; what is compiled is told by ``variants``. Needs Triton, no GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.backends.nvidia.compiler import sm_arch_from_capability as sm_arch
from triton.compiler import ASTSource

from specoffload_kernels.native.build import cache_dir
from specoffload_kernels.paged_attention.tiling import Vendor


@dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of GPU.

    Attributes:
        name: As its vendor calls it.
        vendor: "cuda" or "hip".
        warp_size: Threads of a warp.
        shared_bytes: Most shared memory of one program.
    """

    name: str
    vendor: Vendor
    warp_size: int
    shared_bytes: int

    @property
    def arch(self) -> int | str:
        """The name as Triton takes it."""
        return int(self.name.removeprefix("sm_")) if self.vendor == "cuda" else self.name


# Compilers do not check shared memory; a launch would. The limit of every NVIDIA GPU since Ampere
# is that of the consumer parts, 99 KiB.
TARGETS = {
    target.name: target
    for target in (
        Target(name="sm_80", vendor="cuda", warp_size=32, shared_bytes=101_376),
        Target(name="sm_90", vendor="cuda", warp_size=32, shared_bytes=101_376),
        Target(name="sm_100", vendor="cuda", warp_size=32, shared_bytes=101_376),
        Target(name="gfx942", vendor="hip", warp_size=64, shared_bytes=65_536),
    )
}
"""The kinds of GPU that kernels are compiled for, by name."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel as a launch would specialise it.

    Attributes:
        label: What distinguishes it, for a person.
        kernel: The Triton function.
        types: Of the arguments that are not constants, in Triton's notation; tuples for tuples.
        aligned: Names of integers that are multiples of 16; all pointers are taken to be.
        constants: Arguments fixed at compile time.
        options: Of the launch.
        tile_bytes: Bytes of K and V, or of another operand, that a step reads and that must move
            in pieces of 16; 0 where the kernel has none.
        narrow_limit: Most loads of single numbers (slots, positions, lengths, each prefetched for
            every stage of a pipeline) beside them.
    """

    label: str
    kernel: Any
    types: Mapping[str, Any]
    constants: Mapping[str, Any]
    options: Mapping[str, object]
    aligned: frozenset[str] = frozenset()
    tile_bytes: int = 0
    narrow_limit: int = 40


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a variant became.

    Attributes:
        assembly: The listing: PTX or AMD GCN.
        registers: Of a thread.
        spilled_bytes: Registers of a thread that went to memory.
        scalar_spills: On AMD, scalar registers that went to vector registers; no memory.
        shared_bytes: Of a program.
        wide_loads: Instructions that read 16 bytes (or more) of global memory.
        narrow_loads: Instructions that read less.
    """

    assembly: str
    registers: int
    spilled_bytes: int
    scalar_spills: int
    shared_bytes: int
    wide_loads: int
    narrow_loads: int

    def faults(self, variant: Variant, target: Target) -> list[str]:
        """Say what is wrong with it; nothing if it may run."""
        threads = int(str(variant.options["num_warps"])) * target.warp_size
        wide_needed = variant.tile_bytes // (16 * threads)
        faults = {
            f"{self.spilled_bytes} bytes of registers spilled": self.spilled_bytes > 0,
            f"{self.shared_bytes} bytes of shared memory, above {target.shared_bytes}": (
                self.shared_bytes > target.shared_bytes
            ),
            f"{self.wide_loads} loads of 16 bytes, where a step takes {wide_needed}": (
                self.wide_loads < wide_needed
            ),
            f"{self.narrow_loads} loads of less than 16 bytes": (
                variant.tile_bytes > 0 and self.narrow_loads > variant.narrow_limit
            ),
        }
        return [fault for fault, is_so in faults.items() if is_so]


def compile_variant(variant: Variant, target: Target) -> Compiled:
    """Compile one variant (seconds), or take it from the cache.

    Raises:
        triton.CompilationError: The compiler refused it.
    """
    signature, attributes = {}, {}
    for index, name in enumerate(variant.kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            continue
        signature[name] = variant.types[name]
        for path, kind in _leaves((index,), variant.types[name]):
            if kind.startswith("*") or name in variant.aligned:
                attributes[path] = [["tt.divisibility", 16]]
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(cache_dir().parent / "triton")
        kernel = triton.compile(
            ASTSource(
                fn=variant.kernel,
                signature=signature,
                constexprs=dict(variant.constants),
                attrs=attributes,
            ),
            target=GPUTarget(target.vendor, target.arch, target.warp_size),
            options={**variant.options, "debug": bool(variant.kernel.debug)},
        )
    return _count_amd(kernel) if target.vendor == "hip" else _count_nvidia(kernel, target)


def _leaves(path: tuple[int, ...], kind: Any) -> list[tuple[tuple[int, ...], str]]:
    if isinstance(kind, str):
        return [(path, kind)]
    return [leaf for index, part in enumerate(kind) for leaf in _leaves((*path, index), part)]


def _count_nvidia(kernel: Any, target: Target) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    ptx = str(kernel.asm["ptx"])
    # A copy with .cg always moves 16 bytes; of a load, type and vector say how many.
    copies = re.findall(r"cp\.async\.(c[ag])\.shared", ptx)
    loads = re.findall(r"ld\.global(?:\.[a-z]+\w*)*?(?:\.v(\d))?\.[bfsu](\d+)\s", ptx)
    wide = [int(count or 1) * int(bits) >= 128 for count, bits in loads]
    wide += [kind == "cg" for kind in copies]
    return Compiled(
        assembly=ptx,
        registers=int(found[1]),
        # An assertion has a frame, too; whether anything spilled, only the assembler says.
        spilled_bytes=_spilled_bytes(ptx, target) if int(found[2]) else 0,
        scalar_spills=0,
        shared_bytes=kernel.metadata.shared,
        wide_loads=sum(wide),
        narrow_loads=len(wide) - sum(wide),
    )


def _spilled_bytes(ptx: str, target: Target) -> int:
    command = [get_ptxas(target.arch).path, "-v", f"--gpu-name={sm_arch(target.arch)}"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        log = subprocess.run(
            [*command, str(source), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    return max(int(number) for number in re.findall(r"(\d+) bytes spill", log))


def _count_amd(kernel: Any) -> Compiled:
    gcn = str(kernel.asm["amdgcn"])

    def entry(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", gcn)
        assert found is not None, name
        return int(found[1])

    loads = re.findall(r"(?:global|buffer)_load_(\w+)", gcn)
    wide = [load.startswith("dwordx4") for load in loads]
    return Compiled(
        assembly=gcn,
        registers=entry("vgpr_count"),
        spilled_bytes=4 * entry("vgpr_spill_count") + entry("private_segment_fixed_size"),
        scalar_spills=entry("sgpr_spill_count"),
        shared_bytes=kernel.metadata.shared,
        wide_loads=sum(wide),
        narrow_loads=len(wide) - sum(wide),
    )
