# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from adaflash.cli import bench, environment
from adaflash.cli.bench_server import bench_server
from adaflash.cli.main import main
from adaflash.cli.measure import BenchRequest, PassResult, PolicySummary, Spread, summarize
from adaflash.request import SamplingParams
from tests.engines import TinySetup
from tests.serving import run, serving
from tests.tiny_tokenizer import write_byte_level_tokenizer


@pytest.fixture
def tiny_flags(tiny_setup: Callable[[str], TinySetup], tmp_path: Path) -> list[str]:
    """`adaflash bench` of a tiny model over two prompts whose characters are in its vocabulary."""
    setup = tiny_setup("llama")
    write_byte_level_tokenizer(tmp_path / "tokenizer")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "xyzw", "domain": "code"}\n')
    return [
        *("bench", "--model", str(setup.target), "--draft", str(setup.drafters["random"])),
        *("--tokenizer", str(tmp_path / "tokenizer"), "--prompts", str(prompts), "--raw-prompts"),
        *("--rounds", "1", "--max-tokens", "5", "--num-kv-blocks", "32", "--max-model-len", "128", "--ignore-eos"),
    ]


def test_report_has_one_entry_per_policy_and_concurrency(
    tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*tiny_flags, "--policies", "off,fixed", "--concurrency", "1,2", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    cases = [(result["policy"], result["concurrency"]) for result in report["results"]]
    assert cases == [("off", 1), ("fixed", 1), ("off", 2), ("fixed", 2)]
    assert all(result["identical"] for result in report["results"])
    assert report["results"][1]["num_verified_tokens"] > 0
    assert report["results"][1]["tokens_per_s"].keys() == {"median", "low", "high"}
    assert report["environment"]["packages"]["torch"]
    assert report["num_requests"] == 2


def test_sampled_output_is_the_same_under_every_policy(tiny_flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert main([*tiny_flags, "--policies", "off,fixed", "--temperature", "1", "--json", str(path)]) == 0
    assert all(result["identical"] for result in json.loads(path.read_text())["results"])


def test_table_goes_to_stdout_without_json(tiny_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*tiny_flags, "--policies", "off", "--domain", "code"]) == 0
    assert "speedup" in capsys.readouterr().out


LONGEST = PolicySummary(
    policy="length_head",
    concurrency=1024,
    num_rounds=3,
    num_output_tokens=1,
    tokens_per_s=Spread(12345.6, 12345.6, 12345.6),
    speedup=Spread(1.85, 1.71, 1.98),
    identical=False,
    ttft_s=Spread(123.45, 123.45, 123.45),
    token_interval_s=Spread(1.2345, 1.2345, 1.2345),
    acceptance_length=3.21,
    verified_per_round=15.12,
    num_verified_tokens=1,
    num_accepted_tokens=1,
    num_cached_tokens=0,
)
HEADINGS = ["load", "policy", "tok/s", "speedup", "tok/fwd", "verified", "TTFT", "ms/tok", "same"]
FIGURES = ["1024", "length_head", "12345.6", "1.85", "(1.71-1.98)", "3.21", "15.12", "123.45s", "1234.5", "NO"]


def _table_lines(width: int) -> list[str]:
    file = io.StringIO()
    bench._show_table([LONGEST], Console(file=file, width=width))
    return file.getvalue().splitlines()[1:]  # Without the title.


def test_the_table_fits_in_80_columns() -> None:
    assert [line.split() for line in _table_lines(80)] == [HEADINGS, FIGURES]


def test_in_a_narrow_terminal_the_table_is_folded_and_not_cut() -> None:
    lines = _table_lines(45)
    assert len(lines) > 2
    assert sorted("".join(lines).replace(" ", "")) == sorted("".join(HEADINGS + FIGURES))


def test_differing_tokens_exit_with_1(tiny_flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(passes: list[PassResult], reference: str) -> object:
        passes[-1].requests[0].token_ids.append(3)
        return summarize(passes, reference)

    monkeypatch.setattr(bench, "summarize", damaged)
    assert main([*tiny_flags, "--policies", "off,fixed"]) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policies", "off,off"], "--policies='off,off' is invalid"),
        (["--policies", "offf"], "verify_policy='offf' is invalid"),
        (["--concurrency", "0"], "--concurrency='0' is invalid"),
        (["--concurrency", "4", "--max-num-seqs", "2"], "is more than max_num_seqs=2"),
        (["--num-prompts", "3"], "--num-prompts=3 is invalid: must be in [1, 2]"),
        (["--domain", "maths"], "holds no prompt of domain 'maths'"),
        (["--rounds", "0"], "--rounds=0 is invalid"),
        (["--address", "localhost:1"], "cannot be set from here"),
        (["--verify-policy", "off"], "unknown flag '--verify-policy'"),
    ],
)
def test_usage_errors_exit_with_2(
    tiny_flags: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main([*tiny_flags, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_server_gets_every_request_once_per_pass(concurrency: int) -> None:
    requests = [BenchRequest([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)) for _ in range(5)]

    async def scenario() -> None:
        seen: list[PassResult] = []
        async with serving() as served:
            info, passes = await bench_server(served.address, None, requests, [concurrency], 2, seen.append)
        assert passes == seen
        assert len(passes) == 2
        assert {result.policy for result in passes} == {info.verify_policy}
        assert [result.num_output_tokens for result in passes] == [20, 20]

    run(scenario())


def test_environment_names_what_a_reader_needs() -> None:
    report = environment.environment()
    assert {"adaflash", "commit", "python", "cpu_model", "torch_threads"} <= report.keys()
    json.dumps(report)
