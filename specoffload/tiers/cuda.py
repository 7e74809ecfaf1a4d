"""The streams of a CUDA device.

Not run on a GPU yet: what is above this file is tested with simulated streams.
"""

from __future__ import annotations

import torch

from specoffload.tiers.streams import Mark, StreamName, Streams


class CudaStreams(Streams[torch.cuda.Event]):
    """Two copy streams beside the stream that torch computes on; loads go before stores.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        # The lower number is the higher priority.
        self._up = torch.cuda.Stream(device, priority=-1)
        self._down = torch.cuda.Stream(device, priority=0)

    def is_reached(self, mark: Mark[torch.cuda.Event]) -> bool:
        """Whether a mark is reached."""
        return bool(mark.event.query())

    def seconds_between(
        self, first: Mark[torch.cuda.Event], second: Mark[torch.cuda.Event]
    ) -> float:
        """Return the time from one reached mark to another."""
        return float(first.event.elapsed_time(second.event)) / 1e3

    def pin(self, memory: torch.Tensor) -> None:
        """Register host memory with the driver."""
        if memory.numel():
            error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
            if int(error):
                raise OSError(
                    f"cannot pin {memory.numel()} bytes of host memory (CUDA error {int(error)}):"
                    " lower host_budget, or raise the limit of locked memory (ulimit -l)"
                )

    def unpin(self, memory: torch.Tensor) -> None:
        """Take host memory out of the driver's books."""
        if memory.numel():
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def _stream(self, name: StreamName) -> torch.cuda.Stream:
        if name is StreamName.COMPUTE:
            # Only the thread that computes marks it or lets it wait.
            return torch.cuda.current_stream(self._device)
        return self._up if name is StreamName.UP else self._down

    def _new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def _record(self, stream: StreamName, event: torch.cuda.Event) -> None:
        event.record(self._stream(stream))

    def _wait(self, stream: StreamName, event: torch.cuda.Event) -> None:
        self._stream(stream).wait_event(event)

    def _copy(self, stream: StreamName, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream(stream)):
            target.copy_(source, non_blocking=True)

    def _synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()
