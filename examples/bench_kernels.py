"""How close attention on the CPU comes to the speed of reading K and V once.

Prints GB/s of K and V, and the share of a plain read of the same memory in the same run, for 1 and
5 query tokens; beside it what torch offers over contiguous K and V. Calls take turns, and figures
are medians, so that a busy machine disturbs all alike. Where a model's layers together exceed the
processor's cache, as they do in decoding, every call takes the next layer.

    python examples/bench_kernels.py [--threads 2] [--rounds 9]
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import TypeAlias

import torch

import specoffload_kernels as kernels
from specoffload.tiers import ram

Call: TypeAlias = Callable[[int], object]

SHAPES = {  # query heads, kv heads, head_dim, block_size, blocks, layers
    "135M, 7.5K tokens": (9, 3, 64, 64, 120, 30),
    "8B layer, 32K tokens": (32, 8, 128, 64, 512, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{kernels.describe()}, {options.threads} threads, medians of {options.rounds} rounds")
    for name, shape in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            bench(name, shape, dtype, options.rounds)


def bench(name: str, shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> None:
    num_q_heads, num_heads, head_dim, block_size, num_blocks, num_layers = shape
    blocks = (num_blocks, 2, num_heads, block_size, head_dim)
    num_bytes = math.prod(blocks) * dtype.itemsize
    layers = ram.allocate(num_layers * num_bytes).view(dtype).view(num_layers, *blocks)
    table = torch.randperm(num_blocks).int()[None]
    kv_len = torch.tensor([num_blocks * block_size])
    contiguous = (num_layers, 2, 1, num_heads, num_blocks * block_size, head_dim)
    kv = torch.empty(contiguous, dtype=dtype)
    for layer in range(num_layers):
        layers[layer] = torch.randn(blocks)
        kv[layer] = torch.randn(contiguous[1:])

    calls: dict[str, Call] = {"plain read": lambda n: layers[n].view(-1).view(torch.float32).sum()}
    for num_q in (1, 5):
        q = torch.randn(1, num_q, num_q_heads, head_dim).to(dtype).transpose(1, 2)
        calls |= attention_calls(q, layers, table, kv_len, kv)
    seconds = take_turns(calls, num_layers, rounds)

    read = seconds["plain read"]
    print(f"\n{name}, {str(dtype).removeprefix('torch.')}, {num_bytes / 1e6:.0f} MB of K and V")
    for call, median in seconds.items():
        print(
            f"  {call:32s}{median * 1e3:9.2f} ms{num_bytes / median / 1e9:8.1f} GB/s"
            f"{read / median:7.0%} of a plain read"
        )


def attention_calls(
    q: torch.Tensor,
    layers: torch.Tensor,
    table: torch.Tensor,
    kv_len: torch.Tensor,
    kv: torch.Tensor,
) -> dict[str, Call]:
    num_q, num_k = q.shape[2], kv.shape[4]
    groups = q.shape[1] // kv.shape[3]
    start = kv_len - num_q
    mask = torch.arange(num_k) <= torch.arange(num_k - num_q, num_k)[:, None]
    # The flash kernel gets the group's rows as one head; the mask is left out, in its favour.
    packed = q.reshape(1, kv.shape[3], groups * num_q, q.shape[3])
    scale = q.shape[3] ** -0.5
    return {
        f"paged, q={num_q}": lambda n: kernels.paged_attention(
            q, layers[n], table, start, kv_len, scale=scale
        ),
        f"sdpa enable_gqa, q={num_q}": lambda n: torch.nn.functional.scaled_dot_product_attention(
            q, *kv[n], attn_mask=mask if num_q > 1 else None, scale=scale, enable_gqa=True
        ),
        f"aten flash, packed rows, q={num_q}": lambda n: (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(packed, *kv[n], scale=scale)
        ),
    }


def take_turns(calls: dict[str, Call], num_layers: int, rounds: int) -> dict[str, float]:
    """Median seconds of each call, given the number of a layer that the one before did not read."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    layers = itertools.cycle(range(num_layers))
    for call in calls.values():
        call(next(layers))
    for _ in range(max(rounds, min(num_layers, 3 * rounds))):
        for name, call in calls.items():
            layer = next(layers)
            start = time.perf_counter()
            call(layer)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
