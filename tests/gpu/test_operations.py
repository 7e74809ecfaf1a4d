"""Every operation on the GPU, by Triton and by torch, against its definition on the CPU."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import CASES, Case, assert_equals_definition

import specoffload_kernels as kernels
from specoffload_kernels.gpu import gpu_path
from specoffload_kernels.registry import OPERATIONS, Operation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU"),
]
CALLS = [
    pytest.param(operation, case, id=f"{name}: {case.label}")
    for name, operation in OPERATIONS.items()
    for case in CASES[name]()
]


@pytest.mark.parametrize(("operation", "case"), CALLS)
def test_the_chosen_path_equals_the_definition(operation: Operation, case: Case) -> None:
    assert_equals_definition(operation, case, operation.overload, "cuda")


@pytest.mark.parametrize(("operation", "case"), CALLS)
def test_the_torch_path_equals_the_definition(operation: Operation, case: Case) -> None:
    with kernels.forced_backend("torch"):
        assert_equals_definition(operation, case, operation.overload, "cuda")


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_torch_accepts_the_registration(operation: Operation) -> None:
    args, kwargs = next(iter(CASES[operation.name]())).drawn("cuda")
    torch.library.opcheck(operation.overload, args, kwargs)


def test_an_operation_with_a_kernel_takes_it() -> None:
    pytest.importorskip("triton")
    paths = kernels.operation_paths()["cuda"]
    assert paths == {name: str(gpu_path(name)) for name in OPERATIONS}
    assert paths["paged_attention"] == "triton"
