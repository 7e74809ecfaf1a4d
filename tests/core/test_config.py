"""What a user may choose, and what is refused with which advice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload import BudgetError, ConfigError, SpecOffloadConfig, SpecOffloadError
from specoffload.config import MAX_DRAFT_TOKENS, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1 B", 1),
        ("2KiB", 2048),
        ("2kb", 2000),
        ("1.5 MiB", 3 * 2**19),
        (" 2GiB ", 2**31),
        ("1TB", 10**12),
        (7, 7),
    ],
)
def test_a_size_is_read_as_bytes(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text, name="device_budget") == num_bytes


@pytest.mark.parametrize(
    "value", ["", "GiB", "-1", "1 parsec", "1,5 GiB", "1e3", -1, 1.5, True, None]
)
def test_no_size_is_refused_with_its_name_and_value(value: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_bytes(value, name="host_budget")  # type: ignore[arg-type]
    assert f"host_budget={value!r}" in str(refusal.value)


@given(st.integers(min_value=0, max_value=2**50))
def test_a_size_shown_reads_back_as_nearly_the_same(num_bytes: int) -> None:
    shown = parse_bytes(format_bytes(num_bytes), name="shown")
    assert abs(shown - num_bytes) <= 0.06 * num_bytes


@pytest.mark.parametrize("block_size", [1, 2, 64, 1024])
@pytest.mark.parametrize("gamma", [0, 1, MAX_DRAFT_TOKENS, "auto"])
def test_every_documented_value_is_accepted(block_size: int, gamma: int | str) -> None:
    config = SpecOffloadConfig(block_size=block_size, num_draft_tokens=gamma)  # type: ignore[arg-type]
    assert config.max_draft_tokens == (MAX_DRAFT_TOKENS if gamma == "auto" else gamma)


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        ("block_size", 48, "power of two"),
        ("block_size", 0, "power of two"),
        ("block_size", 2048, "1024"),
        ("block_size", 16.0, "power of two"),
        ("block_size", True, "power of two"),
        ("num_draft_tokens", -1, "0 to 16"),
        ("num_draft_tokens", MAX_DRAFT_TOKENS + 1, "0 to 16"),
        ("num_draft_tokens", "4", "'auto'"),
        ("num_draft_tokens", 1.5, "int"),
        ("num_draft_tokens", True, "int"),
        ("prefill_chunk", 0, "at least 1"),
        ("prefill_chunk", "64", "int"),
        ("device_budget", "much", "GiB"),
        ("device_budget", -5, "0 bytes or more"),
        ("host_budget", "automatic", "GiB"),
        ("disk_io", "o_direct", "'direct'"),
        ("disk_io", True, "'buffered'"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_bound(
    option: str, value: object, advice: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        SpecOffloadConfig(**{option: value})
    message = str(refusal.value)
    assert message.startswith(f"{option}={value!r}")
    assert advice in message


def test_a_misspelt_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="'device_buget': did you mean 'device_budget'"):
        SpecOffloadConfig.from_mapping({"device_buget": "1GiB"})
    with pytest.raises(ConfigError, match="known: device_budget, host_budget, disk_path"):
        SpecOffloadConfig.from_mapping({"zzz": 1})


def test_a_mapping_gives_the_same_configuration() -> None:
    options = {"device_budget": "2GiB", "block_size": 32, "num_draft_tokens": 3}
    config = SpecOffloadConfig.from_mapping(options)
    assert config == SpecOffloadConfig(device_budget="2GiB", block_size=32, num_draft_tokens=3)
    assert config.device_budget_bytes == 2**31
    assert SpecOffloadConfig().device_budget_bytes is None


def test_every_refusal_can_be_caught_as_a_value_error() -> None:
    assert issubclass(ConfigError, SpecOffloadError)
    assert issubclass(SpecOffloadError, ValueError)
    assert BudgetError("too small", required_bytes=7).required_bytes == 7
