"""What the Triton kernels become when compiled for GPUs that are not here.

Prints registers, spills, shared memory and the number of 16-byte loads of every variant that the
runtime uses, for every kind of GPU, and exits with 1 if one spills, needs more shared memory than
there is, or reads K and V in smaller pieces. Takes some ten minutes of one core; what is compiled
is kept. Nothing runs on a GPU.

    python examples/kernels_report.py [--targets sm_90,gfx942] [--only prefill]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from specoffload_kernels.aot import TARGETS, compile_variant
from specoffload_kernels.variants import variants


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--only", default="", help="part of a variant's label")
    options = parser.parse_args()
    header = f"{'kernel':15s} {'variant':48s} {'target':7s}"
    print(f"{header} registers spilled  shared wide narrow  (bytes; loads of 16 bytes and of less)")
    totals: Counter[str] = Counter()
    for name in options.targets.split(","):
        target = TARGETS[name]
        for variant in variants(target):
            if options.only not in variant.label:
                continue
            compiled = compile_variant(variant, target)
            scalars = f"; {compiled.scalar_spills} scalars kept in vector registers"
            print(
                f"{variant.kernel.__name__:15s} {variant.label:48s} {name:7s}"
                f" {compiled.registers:9d} {compiled.spilled_bytes:7d} {compiled.shared_bytes:7d}"
                f" {compiled.wide_loads:4d} {compiled.narrow_loads:6d}"
                f"{scalars if compiled.scalar_spills else ''}",
                flush=True,
            )
            for fault in compiled.faults(variant, target):
                print(f"    FAULT: {fault}")
                totals["faults"] += 1
            totals["variants"] += 1
    print(f"{totals['variants']} compiled, {totals['faults']} faults; none has run on a GPU")
    return 1 if totals["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
