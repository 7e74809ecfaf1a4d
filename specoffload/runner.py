"""`SpecOffloadRunner`: decode with a draft and a target while most KV lies off the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from specoffload.config import SpecOffloadConfig, parse_bytes
from specoffload.core.budget import Need, Share, span_blocks, split
from specoffload.decoding import Decoding, Streamer
from specoffload.errors import (
    BudgetError,
    ConfigError,
    SpecOffloadError,
)
from specoffload.hf.models import check_length, check_pair, common_device, kv_shape
from specoffload.hf.requests import Request, read_request
from specoffload.metrics import Meter
from specoffload.report import BlockShare, RunReport
from specoffload.speculation import Lane
from specoffload.tiers.device import DeviceMemory, KVShape
from specoffload.tiers.disk import SpillFile, direct_io_problem
from specoffload.tiers.engine import mover_for
from specoffload.tiers.homes import Homes
from specoffload.tiers.host import HostArena, HostMemory, available_host_bytes
from specoffload.tiers.pool import BlockPool
from specoffload.tiers.ram import PAGE
from specoffload_fusion import Signal, focus
from specoffload_kernels import backend

_HOST_SHARE = 0.5
"""Part of the free host memory that `host_budget="auto"` may take."""


class SpecOffloadRunner:
    """Decodes with a draft and a target, keeping the KV of both within a device budget.

    Greedy float32 output is token for token that of `target.generate`, at any budget. Use as a
    context manager, or call `close`.

    Args:
        draft: the model that proposes tokens; may be the target itself. None: the target decodes
            alone, through the same paged cache.
        target: the model whose text is wanted.
        config: a `SpecOffloadConfig`, or a mapping of its attributes.

    Raises:
        ConfigError: an option is unknown or invalid.
        UnsupportedModelError: a model cannot be paged, or the pair does not share a vocabulary.
        BudgetError: `device_budget` cannot hold the working set of one row.
        SpillError: `disk_path` cannot hold a spill file of the kind that `disk_io` asks for.
    """

    def __init__(
        self,
        draft: PreTrainedModel | None,
        target: PreTrainedModel,
        config: SpecOffloadConfig | Mapping[str, Any] | None = None,
    ) -> None:
        if config is None:
            config = SpecOffloadConfig()
        elif isinstance(config, Mapping):
            config = SpecOffloadConfig.from_mapping(config)
        self.config = config
        self._target = target
        self._draft = draft
        self._max_gamma = 0 if draft is None else config.max_draft_tokens
        self._shapes = [kv_shape(target, config.block_size, role="target")]
        if draft is not None:
            draft_shape = kv_shape(draft, config.block_size, role="draft")
            check_pair(draft, target)
            if self._max_gamma:
                self._shapes.append(draft_shape)
        device = common_device([target] if draft is None else [target, draft])
        limit = config.device_budget_bytes
        if limit is not None and limit < self.minimum_device_bytes:
            raise BudgetError(
                f"device_budget={config.device_budget!r} cannot hold the working set of one row:"
                f" at least {self.minimum_device_bytes} bytes are needed; raise it, or lower"
                " block_size or num_draft_tokens",
                required_bytes=self.minimum_device_bytes,
            )
        self._direct_io = self._check_disk(device)
        self._memory = DeviceMemory(device, limit)
        self._mover = mover_for(
            device, block_bytes=max(shape.block_bytes for shape in self._shapes)
        )
        self._host = HostMemory(
            pin=self._mover.pin, unpin=self._mover.unpin, keeps=device.type != "cpu"
        )
        self._busy = threading.Lock()
        self._closed = False
        self._report = RunReport(device_budget_bytes=limit, kernel=backend())
        self._signal: Signal | None = None

    @property
    def minimum_device_bytes(self) -> int:
        """The smallest device budget that one row of any length can be decoded in."""
        span = span_blocks(self._max_gamma + 1, self.config.block_size)
        return sum((shape.num_layers * span + 2) * shape.block_bytes for shape in self._shapes)

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        streamer: Streamer | None = None,
    ) -> torch.Tensor:
        """Continue each row greedily, as `target.generate(..., do_sample=False)` would.

        Args:
            input_ids: prompts `[rows, tokens]`, padded on the left.
            attention_mask: `[rows, tokens]`, 0 on padding; told from `pad_token_id` if None.
            max_new_tokens: most tokens to add to a row.
            max_length: most tokens of a row, its padded prompt included.
            eos_token_id: id or ids that end a row; the target's `generation_config` if None.
            pad_token_id: fills rows that ended early; likewise.
            streamer: gets the prompt, then each committed token once; for one row.

        Returns:
            `[rows, tokens + new]`, int64.

        Raises:
            SpecOffloadError: an argument cannot be honoured; nothing was run.
            SpillError: a block could not be moved. The runner stays usable.
        """
        try:
            request = self._read(
                input_ids,
                attention_mask,
                max_new_tokens=max_new_tokens,
                max_length=max_length,
                eos_token_id=eos_token_id,
                pad_token_id=pad_token_id,
            )
            if streamer is not None and len(request.prompts) > 1:
                raise SpecOffloadError(
                    f"a streamer takes one row, and input_ids has {len(request.prompts)}"
                )
            if not self._busy.acquire(blocking=False):
                raise SpecOffloadError(
                    "another thread is generating with this runner: use one runner a thread"
                )
            try:
                texts = self._run(request, streamer)
            finally:
                self._busy.release()
        finally:
            # Whoever reads the other end of the streamer must not wait for ever.
            if streamer is not None:
                streamer.end()
        new = [text[len(prompt) :] for text, prompt in zip(texts, request.prompts, strict=True)]
        out = torch.full((len(new), max(map(len, new))), request.pad_token_id, dtype=torch.long)
        for row, tokens in zip(out, new, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        return torch.cat([input_ids.long(), out.to(input_ids.device)], dim=1)

    def report(self) -> RunReport:
        """Return what the last `generate` did."""
        return self._report

    def last_signal(self) -> Signal | None:
        """Return the target's attention mass in the last verify; None if none was collected."""
        return self._signal

    def close(self) -> None:
        """End the runner's threads and give its memory back. Idempotent."""
        self._closed = True
        self._mover.quiesce()
        self._host.release()
        self._mover.close()
        self._memory.release()

    def __enter__(self) -> SpecOffloadRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- one call

    def _check_disk(self, device: torch.device) -> list[bool]:
        """Return which models' spill files go past the page cache.

        A folder that cannot hold one is better known now than at the first call.
        """
        if self.config.disk_path is None:
            return [False] * len(self._shapes)
        folder, asked = Path(self.config.disk_path), self.config.disk_io
        SpillFile(folder, PAGE, 1, direct=asked == "direct").close()
        in_pages = [shape.block_bytes % PAGE == 0 for shape in self._shapes]
        if asked == "direct" and not all(in_pages):
            sizes = " and ".join(str(shape.block_bytes) for shape in self._shapes)
            raise ConfigError(
                f"disk_io='direct' moves whole pages of {PAGE} bytes, and blocks have {sizes}:"
                " raise block_size, or set disk_io to 'auto' or 'buffered'"
            )
        # On a machine without a GPU the page cache is memory that nothing else could use.
        possible = asked == "direct" or (
            asked == "auto" and device.type != "cpu" and direct_io_problem(folder) is None
        )
        return [possible and fits for fits in in_pages]

    def _read(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, **limits: Any
    ) -> Request:
        """Check a call; raises before anything runs."""
        if self._closed:
            raise SpecOffloadError("the runner is closed: make a new one")
        request = read_request(self._target, input_ids, attention_mask, **limits)
        longest = max(len(prompt) for prompt in request.prompts) + request.max_new_tokens
        check_length(self._target, longest, role="target")
        if self._draft is not None and self._max_gamma:
            check_length(self._draft, longest, role="draft")
        return request

    def _run(self, request: Request, streamer: Streamer | None) -> list[list[int]]:
        meter = Meter()
        self._signal = None
        self._mover.stall_s = 0.0
        if streamer is not None:
            streamer.put(torch.tensor([request.prompts[0]]))
        texts: list[list[int]] = []
        host_bytes = self._host_bytes()
        while len(texts) < len(request.prompts):
            plan = self._plan(request, len(texts), host_bytes)
            with torch.inference_mode(), self._lanes(plan, meter) as lanes:
                decoding = Decoding(
                    request,
                    plan.prompts,
                    lanes,
                    self.config,
                    first_row=len(texts),
                    streamer=streamer,
                    meter=meter,
                )
                texts += decoding.run()
                self._signal = decoding.signal
        self._report = meter.report(
            stall_s=self._mover.stall_s,
            engine_bytes=self._mover.peak_bytes,
            prompt_tokens=sum(map(len, request.prompts)),
            device_budget_bytes=self._memory.limit_bytes,
            kernel=backend(),
            focus=self._focus(),
        )
        return texts

    def _host_bytes(self) -> int:
        if self.config.host_budget == "auto":
            # What is still held from the last call is free for this one.
            return int((available_host_bytes() + self._host.num_bytes) * _HOST_SHARE)
        return parse_bytes(self.config.host_budget, name="host_budget")

    def _plan(self, request: Request, first: int, host_bytes: int) -> _Plan:
        """Take as many of the remaining rows as fit together; those left over run after them."""
        for end in range(len(request.prompts), first, -1):
            prompts = request.prompts[first:end]
            # The last token of a row is never fed, so it never enters the cache.
            num_tokens = [len(prompt) + request.max_new_tokens - 1 for prompt in prompts]
            needs = [self._need(shape, num_tokens) for shape in self._shapes]
            try:
                shares = split(
                    needs,
                    device_bytes=self._memory.limit_bytes,
                    host_bytes=host_bytes,
                    has_disk=self.config.disk_path is not None,
                )
            except BudgetError:
                if end == first + 1:
                    raise
                continue
            num_blocks = max(-(-tokens // self.config.block_size) for tokens in num_tokens)
            return _Plan(prompts=prompts, num_blocks=num_blocks, needs=needs, shares=shares)
        raise AssertionError("a plan for one row either exists or raises")

    def _need(self, shape: KVShape, num_tokens: list[int]) -> Need:
        block_size = self.config.block_size
        round_tokens = self._max_gamma + 1
        step = max(self.config.prefill_chunk, round_tokens)
        total = working = 0
        for tokens in num_tokens:
            blocks = -(-tokens // block_size)
            working += shape.num_layers * min(blocks, span_blocks(round_tokens, block_size))
            for window in shape.windows:
                inside = blocks if window is None else span_blocks(window + step, block_size)
                total += min(blocks, inside)
        return Need(block_bytes=shape.block_bytes, total=total, working=min(working, total))

    @contextmanager
    def _lanes(self, plan: _Plan, meter: Meter) -> Iterator[list[Lane]]:
        """Lay out the tiers for a plan; take everything back afterwards, whatever happened."""
        models = [self._target] if self._draft is None else [self._target, self._draft]
        pools: list[BlockPool] = []
        homes: list[Homes] = []
        try:
            hosts = self._host.carve(
                [
                    share.num_host_slots * shape.block_bytes
                    for shape, share in zip(self._shapes, plan.shares, strict=True)
                ]
            )
            for shape, share, host, direct in zip(
                self._shapes, plan.shares, hosts, self._direct_io, strict=True
            ):
                homes.append(self._homes(shape, share, host, direct=direct))
            memories = self._memory.carve(
                [
                    (share.num_slots + share.num_staging) * shape.block_bytes
                    for shape, share in zip(self._shapes, plan.shares, strict=True)
                ],
                num_lent=plan.shares[0].num_lent * self._shapes[0].block_bytes,
            )
            for shape, share, memory, home in zip(
                self._shapes, plan.shares, memories, homes, strict=True
            ):
                pools.append(
                    BlockPool(
                        shape,
                        self._memory,
                        memory,
                        share,
                        num_rows=len(plan.prompts),
                        num_blocks=plan.num_blocks,
                        homes=home,
                        mover=self._mover,
                        poison=self.config.poison,
                    )
                )
            yield [
                Lane(model, pool, prefill_chunk=self.config.prefill_chunk)
                for model, pool in zip(models, pools, strict=False)
            ]
        finally:
            for pool in pools:
                pool.abandon()
            meter.add_memory(
                pools,
                homes,
                device=self._memory,
                kv_bytes=sum(need.total_bytes for need in plan.needs),
            )
            for home in homes:
                home.close()
            self._host.end_call()

    def _homes(self, shape: KVShape, share: Share, host: torch.Tensor, *, direct: bool) -> Homes:
        spill = None
        if share.num_extents:
            assert self.config.disk_path is not None
            spill = SpillFile(
                Path(self.config.disk_path), shape.block_bytes, share.num_extents, direct=direct
            )
        return Homes(HostArena(share.num_host_slots, shape.block_bytes, host), spill)

    def _focus(self) -> tuple[BlockShare, ...]:
        if self._signal is None:
            return ()
        return tuple(
            BlockShare(row=row, layer=layer, block=block, mass=mass)
            for row, layer, block, mass in focus(self._signal)
        )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Rows that are decoded together, and the memory they get."""

    prompts: list[list[int]]
    num_blocks: int
    needs: list[Need]
    shares: list[Share]
