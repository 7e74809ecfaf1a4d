"""One walk over the registry: every operation and path against its definition and its schema."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from kernel_cases import CASES, Case, assert_equals_definition, tensors_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import specoffload_kernels as kernels
from specoffload_kernels import registry
from specoffload_kernels.gpu import GpuPath, gpu_path
from specoffload_kernels.registry import OPERATIONS, Operation

CALLS = [
    pytest.param(operation, case, id=f"{name}: {case.label}")
    for name, operation in OPERATIONS.items()
    if name in CASES
    for case in CASES[name]()
]


def missing(operation: Operation) -> list[str]:
    """Name what an operation lacks to be held to anything."""
    lacks = {
        "a reference": operation.reference is None,
        "a fake": operation.fake is None,
        "cases": not any(CASES.get(operation.name, lambda: iter(()))()),
    }
    return [what for what, lacking in lacks.items() if lacking]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_operation_brings_what_the_walk_needs(operation: Operation) -> None:
    assert missing(operation) == []


def test_an_operation_without_them_is_found() -> None:
    bare = dataclasses.replace(OPERATIONS["merge"], name="bare", reference=None, fake=None)  # type: ignore[arg-type]
    assert missing(bare) == ["a reference", "a fake", "cases"]


def test_registry_folders_and_torch_name_the_same_operations() -> None:
    package = Path(registry.__file__).parent
    known = torch._C._dispatch_get_all_op_names()
    prefix = f"{package.name}::"
    assert {path.parent.name for path in package.glob("*/reference.py")} == set(OPERATIONS)
    assert {name.removeprefix(prefix) for name in known if name.startswith(prefix)} == set(
        OPERATIONS
    )


@pytest.mark.parametrize(("operation", "case"), CALLS)
def test_every_path_equals_the_definition(operation: Operation, case: Case) -> None:
    for backend in kernels.available_backends() if operation.is_native else ["torch"]:
        with kernels.forced_backend(backend):
            assert_equals_definition(operation, case, operation.overload)


@pytest.mark.parametrize(("operation", "case"), CALLS)
def test_shapes_without_data_equal_the_real_ones(operation: Operation, case: Case) -> None:
    args, kwargs = case.drawn()
    real = operation.overload(*args, **kwargs)
    with FakeTensorMode() as mode:
        args, kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        fake = operation.overload(*args, **kwargs)
    assert pytree.tree_structure(fake) == pytree.tree_structure(real)
    for ours, theirs in zip(tensors_of(fake), tensors_of(real), strict=True):
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert ours.stride() == theirs.stride() or not theirs.numel()


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_torch_accepts_the_registration(operation: Operation) -> None:
    case = next(iter(CASES[operation.name]()))
    args, kwargs = case.drawn()
    torch.library.opcheck(operation.overload, args, kwargs)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_device_has_a_path_and_says_which(name: str) -> None:
    for key in ("CPU", "CUDA", "CompositeExplicitAutograd", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"specoffload_kernels::{name}", key)
    native = kernels.backend() if OPERATIONS[name].is_native else "torch"
    assert kernels.operation_paths()["cpu"][name] == native


def test_an_operation_without_a_triton_kernel_takes_the_torch_path_and_says_so() -> None:
    assert str(gpu_path("native")) == "torch (it has no Triton kernel)"


def test_forcing_torch_holds_on_the_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = GpuPath(backend="triton", reason="", kernel=lambda *_: "by the kernel")
    monkeypatch.setattr(registry, "gpu_path", lambda _: chosen)
    operation, case = OPERATIONS["block_mass"], next(iter(CASES["block_mass"]()))
    assert operation.on_gpu(*case.args) == "by the kernel"
    with kernels.forced_backend("torch"):
        assert_equals_definition(operation, case, operation.on_gpu)


def test_the_public_functions_compile_whole() -> None:
    args, kwargs = next(iter(CASES["paged_attention"]())).drawn()
    num_rows = torch.tensor([5, 1, 0])
    sinks_H = torch.zeros(6)

    def step(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = kernels.paged_attention(*args, **kwargs)
        merged = kernels.merge([part, part], sinks_H=sinks_H)
        assert part.block_lse_BHQN is not None
        return merged.out_BQHD, kernels.block_mass(part.block_lse_BHQN, part.lse_BHQ, 2, num_rows)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(compiled(*args), step(*args), strict=True):
        assert torch.equal(ours, theirs)
