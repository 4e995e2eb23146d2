# SPDX-License-Identifier: Apache-2.0
"""`adaflash simulate` shows, writes and draws what it simulated, and refuses what it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from adaflash.cli.main import main
from adaflash.simulate.acceptance import Answer, write_answers

SMALL = ["simulate", "--concurrency", "1", "2", "--num-requests", "4", "--context", "16", "--output-tokens", "16"]
MADE_UP = ["--acceptance-length", "3.4"]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Answers without a length head, for the demo model's drafter of 7 drafts."""
    rng = np.random.default_rng(0)
    path = tmp_path / "traces.npz"
    confidence = rng.random((12, 7)).astype(np.float32)
    write_answers(path, [Answer(8, confidence, rng.integers(0, 8, 12), None) for _ in range(3)])
    return path


def test_the_table_fits_80_columns_and_has_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *MADE_UP]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip() == "simulated: Qwen3-8B on H200, acceptance length 3.4"
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines[2:]]
    policies = ["off", "fixed", "confidence", "length_head:1.3", "goodput", "oracle"]
    assert [row[:2] for row in rows] == [[users, policy] for users in ("1", "2") for policy in policies]


def test_the_report_says_that_it_is_simulated_and_from_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *MADE_UP, "--policy", "fixed:3", "off", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["simulated"] is True
    assert report["device_sources"].keys() == report["device"].keys() - {"name", "description"}
    assert report["assumptions"]["confidence_noise"] > 0
    assert [result["outcome"]["policy"] for result in report["results"]] == ["off", "fixed:3"] * 2
    assert [result["concurrency"] for result in report["results"]] == [1, 1, 2, 2]
    off, fixed = report["results"][:2]
    assert off["speedup"] == 1.0
    assert fixed["speedup"] == pytest.approx(fixed["outcome"]["tokens_per_s"] / off["outcome"]["tokens_per_s"])


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "speedups.png"
    assert main([*SMALL, *MADE_UP, "--policy", "fixed", "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_arrivals_can_be_a_poisson_process(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "--request-rate", "20", "--num-requests", "8", "--output-tokens", "8", "--policy", "fixed"]
    assert main([*argv, *MADE_UP]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["20/s", "20/s"]


def test_traces_and_a_measured_profile_replace_what_is_made_up(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of one sequence takes 10 ms and 1 ms for each draft; drafting takes 4 ms."""
    profile = tmp_path / "profile.json"
    verify = [[1, rows, 0, 0.010 + 0.001 * (rows - 1)] for rows in range(1, 17)]
    profile.write_text(json.dumps({"verify": verify, "draft": [[1, 0, 0.004], [2, 0, 0.004]]}))
    argv = ["simulate", "--model", "SmolLM2-135M", "--traces", str(traces), "--profile", str(profile)]
    assert main([*argv, "--concurrency", "1", "--num-requests", "3", "--policy", "fixed:1", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] is None
    off, fixed = (result["outcome"] for result in report["results"])
    assert off["inter_token_p50_s"] == pytest.approx(0.010, rel=0.01)
    # The last of an answer's 12 rounds may have nothing left to draft, so that most, not all, take 15 ms.
    assert 0.0145 < fixed["mean_step_s"] < 0.0155


def test_without_a_length_head_in_the_traces_that_policy_is_left_out(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["simulate", "--model", "SmolLM2-135M", "--traces", str(traces), "--concurrency", "1"]
    assert main([*argv, "--num-requests", "3"]) == 0
    assert "length_head" not in capsys.readouterr().out
    assert main([*argv, "--num-requests", "3", "--policy", "length_head"]) == 2
    assert "policy='length_head' is invalid: the traces have no predictions" in capsys.readouterr().err


def test_what_does_not_fit_into_the_devices_memory_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "--target-device", "910C-die", "--concurrency", "2", "--num-requests", "4"]
    assert main([*argv, "--context", "400000", "--output-tokens", "2", "--policy", "off", *MADE_UP]) == 0
    assert "2 users need about" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--target-device", "H20"], "target_device='H20' is invalid: must be one of H200, A100, 910C-die"),
        (["--model", "Qwen3-9B"], "model='Qwen3-9B' is invalid: must be one of Qwen3-8B, Qwen3-Coder-30B-A3B"),
        (["--policy", "fixd"], "policy='fixd' is invalid: must be one of off, fixed[:N]"),
        (["--context", "0"], "--context=0 is invalid: must be >= 1"),
        (["--output-tokens", "1"], "--output-tokens=1 is invalid: must be >= 2"),
        (["--concurrency", "3"], "num_requests=4 is invalid: must be >= 2 x concurrency, 6"),
        (["--profile", "/nowhere.json"], "profile='/nowhere.json' cannot be read"),
        (["--json", "/nowhere/x.json", "--policy", "off"], "--json='/nowhere/x.json' cannot be written"),
        (["--png", "/nowhere/x.png", "--policy", "off"], "--png='/nowhere/x.png' cannot be written"),
    ],
)
def test_a_usage_error_names_the_value_and_what_is_allowed(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *MADE_UP, *argv]) == 2
    assert message in capsys.readouterr().err


def test_without_any_drafts_to_go_by_there_is_nothing_to_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 2
    assert "give --acceptance-length X or --traces FILE" in capsys.readouterr().err


def test_an_impossible_acceptance_length_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--acceptance-length", "17"]) == 2
    assert "acceptance_length=17.0 is invalid: must be in (1, 16)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be an object with verify and draft"),
        (
            '{"verify": [[1, 1, 0, 1]], "draft": [[2, 0, 1]], "row_multiple": 0}',
            "row_multiple=0 must be an integer >= 1",
        ),
        ('{"verify": [], "draft": [[1, 0, 0.1]]}', "verify must be a list of samples, at least one"),
        ('{"verify": [[1, 1, 0]], "draft": [[1, 0, 0.1]]}', "verify[0]=[1, 1, 0] must be 4 numbers"),
        ('{"verify": [[1, 1, 0, 0.1]], "draft": [[1, 0, 0]]}', "draft[0]=[1, 0, 0] must be 3 numbers"),
        ('{"verify": [[1, 1, 0, NaN]], "draft": [[1, 0, 0.1]]}', "verify[0]=[1, 1, 0, nan] must be 4 numbers"),
    ],
)
def test_a_damaged_profile_is_a_usage_error(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    assert main([*SMALL, *MADE_UP, "--profile", str(path)]) == 2
    assert message in capsys.readouterr().err
