"""What a pair on a GPU gets to hear."""

from __future__ import annotations

import pytest
import torch

from specoffload import SpecOffloadRunner, UnsupportedModelError, load_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU"),
]


def test_a_pair_on_a_gpu_is_refused_with_the_remedy() -> None:
    pair = load_pair("tiny")
    with pytest.raises(UnsupportedModelError, match=r"lies on cuda:0.*load the pair on the CPU"):
        SpecOffloadRunner(pair.draft.to("cuda"), pair.target.to("cuda"))
