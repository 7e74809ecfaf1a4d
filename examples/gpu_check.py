"""What a GPU makes of the copies, the kernels and a whole call: three tables in one run.

1. copies between pinned host memory and the device, by block size, each block a copy of its own;
2. attention of one 8B-shaped layer over 8K, 32K and 128K tokens, one query (decode) and five
   (verify), beside the bandwidth at which the device copies its own memory;
3. tokens/s of an 8B-shaped pair of random weights at 32K and 128K tokens, with 100%, 25% and 10% of
   the KV on the device, against transformers' offloaded cache.

Random weights accept no drafts, so the third table measures moving and attending, and no
speculation. What there is no time left for is named and not run.

    python examples/gpu_check.py [--limit-s 400]
    python examples/gpu_check.py --device cpu --small        # the same code, at a toy's size
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import specoffload_kernels as kernels
from specoffload.bench import BenchOptions, run_bench
from specoffload.config import format_bytes
from specoffload.console import Progress
from specoffload.contenders import Request
from specoffload.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is.

    Attributes:
        copy_bytes: block sizes that are copied.
        copied_bytes: bytes of one timed copy of many blocks.
        layer: query heads, kv heads, head_dim and block_size of the layer.
        contexts: tokens that the kernels attend to.
        cache_bytes: K and V to rotate through, beyond what the device caches.
        target: of the pair.
        draft: of the pair; smaller.
        lengths: prompt tokens of the pair.
        prefill_chunk: prompt tokens of one pass.
        dtype: of weights, K and V.
    """

    copy_bytes: tuple[int, ...]
    copied_bytes: int
    layer: tuple[int, int, int, int]
    contexts: tuple[int, ...]
    cache_bytes: int
    target: dict[str, int]
    draft: dict[str, int]
    lengths: tuple[int, ...]
    prefill_chunk: int
    dtype: torch.dtype


FULL = Scale(
    copy_bytes=(1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
    copied_bytes=1 << 28,
    layer=(32, 8, 128, 64),
    contexts=(8192, 32768, 131072),
    cache_bytes=1 << 30,
    target={"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    draft={"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    lengths=(32768, 131072),
    prefill_chunk=4096,
    dtype=torch.bfloat16,
)
SMALL = Scale(
    copy_bytes=(1 << 12, 1 << 16),
    copied_bytes=1 << 18,
    layer=(4, 2, 16, 16),
    contexts=(64, 256),
    cache_bytes=1 << 17,
    target={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    draft={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
    lengths=(200,),
    prefill_chunk=64,
    dtype=torch.float32,
)


class Clock:
    """Seconds of a call on a device, and how many are left for the whole check."""

    def __init__(self, device: torch.device, limit_s: float) -> None:
        self.is_cuda = device.type == "cuda"
        self._end_s = time.perf_counter() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until nothing new is started."""
        return self._end_s - time.perf_counter()

    def seconds(self, call: Callable[[], object], rounds: int = 7) -> float:
        """Return the median time of a call, after one that does not count."""
        call()
        times = []
        for _ in range(rounds):
            if self.is_cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 1e3)
            else:
                start_s = time.perf_counter()
                call()
                times.append(time.perf_counter() - start_s)
        return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a toy's size")
    parser.add_argument("--limit-s", type=float, default=400.0, help="start nothing after this")
    options = parser.parse_args()
    device, scale = torch.device(options.device), SMALL if options.small else FULL
    clock = Clock(device, options.limit_s)
    name = torch.cuda.get_device_name(device) if clock.is_cuda else "CPU"
    print(f"{name}, torch {torch.__version__}, {str(scale.dtype).removeprefix('torch.')}")
    check_copies(device, scale, clock)
    check_kernels(device, scale, clock)
    for num_tokens in scale.lengths:
        check_pair(num_tokens, device, scale, clock)


def check_copies(device: torch.device, scale: Scale, clock: Clock) -> None:
    print("\n| block | host to device GB/s | device to host GB/s |\n|---|---|---|")
    on_host = torch.zeros(scale.copied_bytes, dtype=torch.uint8, pin_memory=clock.is_cuda)
    on_device = torch.zeros(scale.copied_bytes, dtype=torch.uint8, device=device)

    def copy(to: torch.Tensor, from_: torch.Tensor) -> None:
        for one, other in zip(to, from_, strict=True):
            one.copy_(other, non_blocking=True)

    for block_bytes in scale.copy_bytes:
        host, there = (x.view(-1, block_bytes) for x in (on_host, on_device))
        up = clock.seconds(lambda host=host, there=there: copy(there, host))
        down = clock.seconds(lambda host=host, there=there: copy(host, there))
        rates = [f"{scale.copied_bytes / seconds / 1e9:.1f}" for seconds in (up, down)]
        print(f"| {format_bytes(block_bytes)} | {rates[0]} | {rates[1]} |", flush=True)


def check_kernels(device: torch.device, scale: Scale, clock: Clock) -> None:
    one, other = torch.zeros(2, scale.cache_bytes // 2, dtype=torch.uint8, device=device)
    bandwidth = 2 * one.nbytes / clock.seconds(lambda: one.copy_(other))
    print(f"\nThe device copies its own memory at {bandwidth / 1e9:.0f} GB/s, read and write.\n")
    print("| tokens | queries | us | GB/s | of that |\n|---|---|---|---|---|")
    num_q_heads, num_heads, head_dim, block_size = scale.layer
    for num_tokens in scale.contexts:
        num_blocks = num_tokens // block_size
        shape = (num_blocks, 2, num_heads, block_size, head_dim)
        num_bytes = scale.dtype.itemsize * 2 * num_heads * num_tokens * head_dim
        num_layers = -(-scale.cache_bytes // num_bytes)
        layers = torch.randn(num_layers, *shape, dtype=scale.dtype, device=device)
        table = torch.randperm(num_blocks).int()[None].to(device)
        end = torch.tensor([num_tokens], device=device)
        for num_q in (1, 5):
            q = torch.randn(1, num_q_heads, num_q, head_dim, dtype=scale.dtype, device=device)

            start = end - num_q

            def attend(layers=layers, q=q, table=table, start=start, end=end) -> None:
                for arena in layers:
                    kernels.paged_attention(q, arena, table, start, end, scale=head_dim**-0.5)

            seconds = clock.seconds(attend) / num_layers
            rate = num_bytes / seconds
            print(
                f"| {num_tokens} | {num_q} | {seconds * 1e6:.0f} | {rate / 1e9:.0f}"
                f" | {rate / bandwidth:.0%} |",
                flush=True,
            )


def check_pair(num_tokens: int, device: torch.device, scale: Scale, clock: Clock) -> None:
    if clock.left_s < 0:
        print(f"\n{num_tokens} tokens: not run, the time is up")
        return
    pair = Pair(
        name="random",
        draft=random_model(scale.draft, scale, device),
        target=random_model(scale.target, scale, device),
        tokenizer=None,
    )
    vocab_size = pair.target.config.vocab_size
    ids = torch.randint(vocab_size, (1, num_tokens), device=device)
    options = BenchOptions(
        budgets=(100, 25, 10) if clock.is_cuda else (100, 60),
        against=("hf-offloaded",) if clock.is_cuda else ("hf",),
        block_size=scale.layer[3],
        prefill_chunk=scale.prefill_chunk,
        host_budget="auto",
        repeats=1,
    )
    request = Request(pair=pair, ids=ids, new_tokens=16)
    print(f"\n{num_tokens} tokens of prompt, 16 new, one turn each:\n")
    print(run_bench(request, options, progress=Progress()).markdown(), flush=True)


def random_model(sizes: dict[str, int], scale: Scale, device: torch.device) -> PreTrainedModel:
    num_q_heads, num_heads, _, _ = scale.layer
    config = LlamaConfig(
        **sizes,
        num_attention_heads=num_q_heads,
        num_key_value_heads=num_heads,
        vocab_size=128256 if scale is FULL else 512,
        max_position_embeddings=2 * max(scale.lengths),
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        eos_token_id=None,
        pad_token_id=0,
    )
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=scale.dtype).eval()


if __name__ == "__main__":
    main()
