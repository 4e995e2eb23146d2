# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest

from adaflash.cli.measure import (
    BenchRequest,
    PassResult,
    RequestResult,
    RunningRequest,
    run_interleaved,
    run_pass,
    spread,
    summarize,
)
from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.request import CompletionOutput, RequestOutput, SamplingParams, SpeculationStats, Usage
from tests.engines import TinySetup, random_prompts, tiny_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
REQUESTS = [BenchRequest(prompt, PARAMS) for prompt in random_prompts(5, 97, 12)]


@pytest.fixture(scope="module")
def engine(tiny_setup: Callable[[str], TinySetup]) -> Engine:
    config = EngineConfig(max_num_seqs=4, num_kv_blocks=64, enable_prefix_caching=False, max_model_len=128)
    return tiny_engine(tiny_setup("llama"), "random", config)


def _result(policy: str, seconds: float, token_ids: list[int], stats: SpeculationStats | None = None) -> PassResult:
    return PassResult(policy, 1, seconds, [RequestResult(token_ids, 0.5, 1.0, 0, stats or SpeculationStats())])


@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_a_pass_runs_every_request_once_in_order(engine: Engine, concurrency: int) -> None:
    result = run_pass(engine, "fixed", REQUESTS, concurrency)
    assert [len(token_ids) for token_ids in result.token_ids] == [6] * 5
    assert result.num_output_tokens == 30
    assert all(0 < request.ttft_s <= request.latency_s <= result.seconds for request in result.requests)
    expected = engine.generate([request.prompt for request in REQUESTS], PARAMS)
    assert result.token_ids == [output.outputs[0].token_ids for output in expected]


def test_no_more_requests_run_at_once_than_asked_for(engine: Engine) -> None:
    before = engine.stats().num_steps
    run_pass(engine, "off", REQUESTS, 1)
    assert engine.stats().num_steps - before == 5 * 6


def test_policies_alternate_and_every_second_round_is_reversed(engine: Engine) -> None:
    seen: list[str] = []
    run_interleaved(engine, ("off", "fixed"), REQUESTS, 2, 3, lambda result: seen.append(result.policy))
    assert seen == ["off", "fixed", "fixed", "off", "off", "fixed"]


def test_real_policies_give_identical_tokens_and_speculation_ran(engine: Engine) -> None:
    plain, fixed = summarize(run_interleaved(engine, ("off", "fixed"), REQUESTS, 2, 2), "off")
    assert plain.identical
    assert fixed.identical
    assert plain.num_verified_tokens == 0 < fixed.num_verified_tokens
    assert plain.acceptance_length == 1.0


def test_speedup_compares_passes_of_the_same_round() -> None:
    results = [_result("off", 2.0, [1]), _result("x", 1.0, [1]), _result("x", 2.0, [1]), _result("off", 8.0, [1])]
    plain, other = summarize(results, "off")
    assert plain.speedup == spread([1.0])
    assert other.speedup == spread([2.0, 4.0])


def test_other_tokens_are_reported() -> None:
    plain, other = summarize([_result("off", 1.0, [1, 2]), _result("x", 1.0, [1, 3])], "off")
    assert plain.identical is True
    assert other.identical is False


def test_without_the_reference_nothing_is_compared() -> None:
    (summary,) = summarize([_result("fixed", 1.0, [1])], "off")
    assert summary.speedup is None
    assert summary.identical is None


def test_counters_are_summed_before_they_are_divided() -> None:
    stats = SpeculationStats("x", num_rounds=4, num_verified_tokens=10, num_accepted_tokens=6, num_emitted_tokens=10)
    (summary,) = summarize([_result("x", 1.0, [1], stats), _result("x", 1.0, [1], stats)], "off")
    assert summary.acceptance_length == 2.5
    assert summary.verified_per_round == 2.5
    assert summary.num_verified_tokens == 20


def test_first_token_time_ignores_empty_deltas() -> None:
    running = RunningRequest(0.0)
    for token_ids, finished in (([], False), ([7], False), ([8], True)):
        completion = CompletionOutput(0, "", token_ids)
        running.take(RequestOutput("r", [1], [completion], Usage(1, 0, 2), SpeculationStats(), finished))
    result = running.result()
    assert result.token_ids == [7, 8]
    assert 0 < result.ttft_s < result.latency_s
