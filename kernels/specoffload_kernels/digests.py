"""What is kept of the keys of blocks so that blocks that are away can be scored; knows shapes only.

N digested blocks, W bit planes of the codes, P = ceil(D / 8) bytes that hold a bit of D channels.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_BITS = 8
"""Most bits of a code."""


@dataclass(frozen=True, kw_only=True)
class Digests:
    """Digests of a set of blocks; entries depend on nothing but their own block.

    A code is the number of the interval that holds a key's channel, of the ``2**W`` that ``low`` to
    ``high`` is cut into; the key is read back as the interval's centre. With no bits that is the
    centre of the box.

    Attributes:
        mean_NHD: Mean key, in the arena's type.
        low_NHD: Least value of each channel, in the arena's type.
        high_NHD: Largest value of each channel, likewise.
        codes_NHWTP: uint8 bit planes of the codes, the most significant first. Channel d is bit
            ``d % 8`` of byte ``d // 8``; bits beyond D are 0.
        residual_NHT: float16, distance of each key from what its codes read back as, rounded up.
        num_tokens_N: int32 number of tokens that each digest was made from; the entries of later
            tokens are 0.
    """

    mean_NHD: torch.Tensor  # noqa: N815 - the suffix is the shape
    low_NHD: torch.Tensor  # noqa: N815
    high_NHD: torch.Tensor  # noqa: N815
    codes_NHWTP: torch.Tensor  # noqa: N815
    residual_NHT: torch.Tensor  # noqa: N815
    num_tokens_N: torch.Tensor  # noqa: N815

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The fields, in their order."""
        return (
            self.mean_NHD,
            self.low_NHD,
            self.high_NHD,
            self.codes_NHWTP,
            self.residual_NHT,
            self.num_tokens_N,
        )

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Digests:
        """Return the digests whose fields these are, in their order."""
        mean_NHD, low_NHD, high_NHD, codes_NHWTP, residual_NHT, num_tokens_N = tensors
        return cls(
            mean_NHD=mean_NHD,
            low_NHD=low_NHD,
            high_NHD=high_NHD,
            codes_NHWTP=codes_NHWTP,
            residual_NHT=residual_NHT,
            num_tokens_N=num_tokens_N,
        )


class DigestRule(enum.Enum):
    """What of a digest a block is scored by."""

    SHADOW = "shadow"
    """Every key as its codes read back: the best estimate, and a bound by the residuals."""
    BOX = "box"
    """The corner of the box of keys that suits the query best: a bound only, used as estimate."""
    MEAN = "mean"
    """The mean key, for every token: cheap, blind to single keys, and no bound."""


@dataclass(frozen=True, kw_only=True)
class DigestScore:
    """Scores of blocks for each query, on the scale of ``AttentionPart.block_lse_BHQN``.

    Attributes:
        estimate_BHQN: float32, natural log; -inf where the block is absent or invisible.
        upper_BHQN: What the block's log-sum-exp cannot exceed, save for rounding, or None where the
            rule gives no bound.
    """

    estimate_BHQN: torch.Tensor  # noqa: N815
    upper_BHQN: torch.Tensor | None  # noqa: N815


def digest_bytes(
    num_heads: int, block_size: int, head_dim: int, *, bits: int, dtype: torch.dtype
) -> int:
    """Return the bytes that the digest of one block takes, for an arena of type ``dtype``."""
    box_and_mean = 3 * head_dim * dtype.itemsize
    shadow = block_size * (bits * -(-head_dim // 8) + torch.float16.itemsize)
    return num_heads * (box_and_mean + shadow) + torch.int32.itemsize
