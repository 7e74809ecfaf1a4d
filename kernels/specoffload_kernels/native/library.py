"""Loads the native library and calls it; knows pointers and threads, not when to prefer it."""

from __future__ import annotations

import ctypes
import enum
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from specoffload_kernels.native.build import NativeUnavailableError, build, shipped
from specoffload_kernels.part import AttentionPart

_LOGGER = logging.getLogger(__name__)
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_MAX_HEAD_DIM = 1024
_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Slots: TypeAlias = npt.NDArray[np.int32]
_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Isa(enum.IntEnum):
    """Instruction sets the library has code for, in the order of their worth."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2


class _Call(ctypes.Structure):
    """``Call`` of attention.h, field by field."""

    _fields_ = (
        ("q", _POINTER),
        *((f"q_{name}", _INT) for name in ("stride_row", "stride_head", "stride_token", "dtype")),
        ("arena", _POINTER),
        *((f"arena_{name}", _INT) for name in ("stride_slot", "stride_kv", "stride_head", "dtype")),
        ("num_slots", _INT),
        ("table", _POINTER),
        ("table_stride", _INT),
        *((name, _POINTER) for name in ("q_start", "kv_len", "out", "lse", "block_lse")),
        *((f"num_{name}", _INT) for name in ("rows", "q_heads", "heads", "q")),
        *((name, _INT) for name in ("head_dim", "block_size", "num_blocks", "window")),
        *((name, _DOUBLE) for name in ("scale", "softcap")),
        *((name, _INT) for name in ("isa", "num_threads")),
        ("parallel", _POINTER),
    )


class _AppendCall(ctypes.Structure):
    """``AppendCall`` of attention.h, field by field."""

    _fields_ = (
        ("arena", _POINTER),
        *((f"arena_stride_{name}", _INT) for name in ("slot", "kv", "head", "token")),
        ("k", _POINTER),
        *((f"k_stride_{name}", _INT) for name in ("row", "head", "token")),
        ("v", _POINTER),
        *((f"v_stride_{name}", _INT) for name in ("row", "head", "token")),
        ("slots", _POINTER),
        ("offsets", _POINTER),
        *((f"num_{name}", _INT) for name in ("rows", "heads", "q", "slots")),
        ("block_size", _INT),
        ("token_bytes", _INT),
    )


class _CopyCall(ctypes.Structure):
    """``CopyCall`` of attention.h, field by field."""

    _fields_ = (
        ("to", _POINTER),
        ("to_slots", _POINTER),
        *((name, _INT) for name in ("to_stride", "num_to")),
        ("from_", _POINTER),
        ("from_slots", _POINTER),
        *((name, _INT) for name in ("from_stride", "num_from", "num", "block_bytes")),
    )


class _MergeCall(ctypes.Structure):
    """``MergeCall`` of attention.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("outs", "lses", "block_lses", "sinks")),
        *((name, _POINTER) for name in ("out", "lse", "block_lse")),
        *((f"num_{name}", _INT) for name in ("parts", "rows", "q", "q_heads")),
        ("head_dim", _INT),
        ("num_blocks", _INT),
    )


class NativeLibrary:
    """The loaded library.

    Attributes:
        path: The shared object.
        isa: The best instruction set of this processor.
        threads_reason: None if calls use torch's threads, else why they run on one.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailableError(f"cannot load {path}: {error}") from error
        self.path = path
        library.specoffload_isa.restype = ctypes.c_int64
        self.isa = Isa(library.specoffload_isa())
        self._attend = library.specoffload_paged_attention
        self._attend.restype = ctypes.c_int64
        self._attend.argtypes = (ctypes.c_void_p,)
        self._append = library.specoffload_append
        self._append.restype = ctypes.c_int64
        self._append.argtypes = (ctypes.c_void_p,)
        self._copy = library.specoffload_copy_blocks
        self._copy.restype = ctypes.c_int64
        self._copy.argtypes = (ctypes.c_void_p,)
        self._merge = library.specoffload_merge
        self._merge.restype = None
        self._merge.argtypes = (ctypes.c_void_p,)
        self._parallel, self.threads_reason = _torch_parallel()

    def supports(self, q_BHQD: torch.Tensor, arena_S2HTD: torch.Tensor) -> bool:
        """Say whether ``paged_attention`` takes tensors of these types and layouts."""
        head_dim = arena_S2HTD.shape[4]
        return (
            q_BHQD.dtype in _DTYPES
            and arena_S2HTD.dtype in _DTYPES
            and head_dim % 4 == 0
            and head_dim <= _MAX_HEAD_DIM
            and q_BHQD.stride(3) == 1
            and arena_S2HTD.stride()[3:] == (head_dim, 1)
            and arena_S2HTD.device.type == "cpu"
        )

    def paged_attention(
        self,
        q_BHQD: torch.Tensor,
        arena_S2HTD: torch.Tensor,
        table_BN: torch.Tensor,
        q_start_B: torch.Tensor,
        kv_len_B: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        with_block_lse: bool,
        isa: Isa,
    ) -> AttentionPart:
        """Attend to the blocks that have a slot; see ``specoffload_kernels.paged_attention``.

        Releases the interpreter lock. The result does not depend on the number of threads.
        """
        num_rows, num_q_heads, num_q, head_dim = q_BHQD.shape
        num_blocks = table_BN.shape[1]
        out_BQHD = torch.empty((num_rows, num_q, num_q_heads, head_dim))
        lse_BHQ = torch.empty((num_rows, num_q_heads, num_q))
        block_lse_BHQN = (
            torch.empty((num_rows, num_q_heads, num_q, num_blocks)) if with_block_lse else None
        )
        # Held by name until the call returns: the structure keeps addresses only.
        table_BN, q_start_B = table_BN.contiguous(), q_start_B.contiguous()
        kv_len_B = kv_len_B.contiguous()
        q_strides, arena_strides = q_BHQD.stride(), arena_S2HTD.stride()
        call = _Call(
            q_BHQD.data_ptr(),
            q_strides[0],
            q_strides[1],
            q_strides[2],
            _DTYPES[q_BHQD.dtype],
            arena_S2HTD.data_ptr(),
            arena_strides[0],
            arena_strides[1],
            arena_strides[2],
            _DTYPES[arena_S2HTD.dtype],
            arena_S2HTD.shape[0],
            table_BN.data_ptr(),
            num_blocks,
            q_start_B.data_ptr(),
            kv_len_B.data_ptr(),
            out_BQHD.data_ptr(),
            lse_BHQ.data_ptr(),
            0 if block_lse_BHQN is None else block_lse_BHQN.data_ptr(),
            num_rows,
            num_q_heads,
            arena_S2HTD.shape[2],
            num_q,
            head_dim,
            arena_S2HTD.shape[3],
            num_blocks,
            window or 0,
            scale,
            softcap or 0.0,
            isa,
            torch.get_num_threads(),
            self._parallel,
        )
        status = self._attend(ctypes.addressof(call))
        if status == 1:
            raise MemoryError("paged attention could not allocate its scratch memory")
        if status == 2:
            raise IndexError(
                f"the table names slot {int(table_BN.max())} of an arena of {arena_S2HTD.shape[0]}"
            )
        return AttentionPart(out_BQHD=out_BQHD, lse_BHQ=lse_BHQ, block_lse_BHQN=block_lse_BHQN)

    def merge(self, parts: Sequence[AttentionPart], sinks_H: torch.Tensor | None) -> AttentionPart:
        """Combine parts on the CPU; see ``specoffload_kernels.merge``.

        One call releases the interpreter lock once, whatever the number of parts: threads that load
        the next blocks want it, too.
        """
        num_rows, num_q, num_q_heads, head_dim = parts[0].out_BQHD.shape
        outs = [part.out_BQHD.contiguous() for part in parts]
        lses = [part.lse_BHQ.contiguous() for part in parts]
        block_lses = [
            part.block_lse_BHQN.contiguous() for part in parts if part.block_lse_BHQN is not None
        ]
        if len(block_lses) < len(parts):
            block_lses = []
        sinks_H = None if sinks_H is None else sinks_H.float().contiguous()
        out_BQHD, lse_BHQ = torch.empty_like(outs[0]), torch.empty_like(lses[0])
        block_lse_BHQN = torch.empty_like(block_lses[0]) if block_lses else None
        pointers = [_pointers(tensors) for tensors in (outs, lses, block_lses)]
        call = _MergeCall(
            *(ctypes.addressof(array) if len(array) else None for array in pointers),
            None if sinks_H is None else sinks_H.data_ptr(),
            out_BQHD.data_ptr(),
            lse_BHQ.data_ptr(),
            None if block_lse_BHQN is None else block_lse_BHQN.data_ptr(),
            len(parts),
            num_rows,
            num_q,
            num_q_heads,
            head_dim,
            0 if block_lse_BHQN is None else block_lse_BHQN.shape[3],
        )
        self._merge(ctypes.addressof(call))
        return AttentionPart(out_BQHD=out_BQHD, lse_BHQ=lse_BHQ, block_lse_BHQN=block_lse_BHQN)

    def append(
        self,
        arena_S2HTD: torch.Tensor,
        k_BHQD: torch.Tensor,
        v_BHQD: torch.Tensor,
        slots_BQ: torch.Tensor,
        offsets_BQ: torch.Tensor,
    ) -> None:
        """Write new tokens to their slots; see ``specoffload_kernels.append``.

        All types are served; D must be contiguous in the arena.
        """
        # Held by name until the call returns: the structure keeps addresses only.
        k_BHQD, v_BHQD = (
            x if x.dtype == arena_S2HTD.dtype and x.stride(3) == 1 else _laid_out(x, arena_S2HTD)
            for x in (k_BHQD, v_BHQD)
        )
        slots_BQ, offsets_BQ = slots_BQ.long().contiguous(), offsets_BQ.long().contiguous()
        num_rows, num_heads, num_q, head_dim = k_BHQD.shape
        size = arena_S2HTD.element_size()
        arena, k, v = arena_S2HTD.stride(), k_BHQD.stride(), v_BHQD.stride()
        call = _AppendCall(
            arena_S2HTD.data_ptr(),
            arena[0] * size,
            arena[1] * size,
            arena[2] * size,
            arena[3] * size,
            k_BHQD.data_ptr(),
            k[0] * size,
            k[1] * size,
            k[2] * size,
            v_BHQD.data_ptr(),
            v[0] * size,
            v[1] * size,
            v[2] * size,
            slots_BQ.data_ptr(),
            offsets_BQ.data_ptr(),
            num_rows,
            num_heads,
            num_q,
            arena_S2HTD.shape[0],
            arena_S2HTD.shape[3],
            head_dim * size,
        )
        if self._append(ctypes.addressof(call)):
            raise IndexError(
                f"slots reach {int(slots_BQ.max())} and offsets {int(offsets_BQ.max())} in an "
                f"arena of {arena_S2HTD.shape[0]} slots of {arena_S2HTD.shape[3]} tokens"
            )

    def copy_blocks(
        self, to_SX: _Bytes, to_slots: _Slots, from_SX: _Bytes, from_slots: _Slots
    ) -> None:
        """Copy slots of one arena to slots of another; see ``specoffload_kernels.copy_blocks``."""
        to_slots, from_slots = np.ascontiguousarray(to_slots), np.ascontiguousarray(from_slots)
        call = _CopyCall(
            to_SX.ctypes.data,
            to_slots.ctypes.data,
            to_SX.strides[0],
            len(to_SX),
            from_SX.ctypes.data,
            from_slots.ctypes.data,
            from_SX.strides[0],
            len(from_SX),
            len(to_slots),
            to_SX.shape[1],
        )
        if self._copy(ctypes.addressof(call)):
            raise IndexError(
                f"slots {to_slots} of {len(to_SX)} and {from_slots} of {len(from_SX)}: one of them"
                " lies outside its arena"
            )


def _pointers(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (_POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _laid_out(x_BHQD: torch.Tensor, arena_S2HTD: torch.Tensor) -> torch.Tensor:
    return x_BHQD.to(arena_S2HTD.dtype).contiguous()


def load() -> NativeLibrary:
    """Load the library that came with the package, else one that is built, unless it is cached.

    Raises:
        NativeUnavailableError: It cannot be built or loaded; the message says why.
    """
    ours = shipped()
    if ours is not None:
        try:
            return NativeLibrary(ours)
        except NativeUnavailableError as error:
            _LOGGER.warning("the native library of the package does not run here: %s", error)
    return NativeLibrary(build())


def _torch_parallel() -> tuple[int | None, str | None]:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch has loaded.

    The library links no OpenMP of its own: a second runtime's spinning threads would fight with
    torch's for the same cores. torch loads its runtime with global symbols.
    """
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return None, "this torch has no OpenMP threads to share"
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return None, "torch's OpenMP runtime does not offer GOMP_parallel"
    return ctypes.cast(function, ctypes.c_void_p).value, None
