# SPDX-License-Identifier: Apache-2.0
"""The engine on an NPU yields the CPU's tokens in fp32, with every op on its kernel: a fallback would be an error."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.engine.loading import load_engine
from adaflash.request import RequestOutput, SamplingParams
from tests.engines import OracleRunner, TinySetup, random_prompts, run_all

POLICIES = (None, "fixed", "confidence", "length_head", "goodput")


def config_of(setup: TinySetup, device: str, policy: str | None, **changes: object) -> EngineConfig:
    base = EngineConfig(
        model=str(setup.target),
        draft=None if policy is None else str(setup.drafters["random"]),
        device=device,
        dtype="float32",
        verify_policy=policy or "auto",
        block_size=128,
        num_kv_blocks=24,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        strict_ops=True,
    )
    return replace(base, **changes)


def tokens_of(outputs: list[RequestOutput]) -> list[list[tuple[list[int], str | None]]]:
    return [[(choice.token_ids, choice.finish_reason) for choice in output.outputs] for output in outputs]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.usefixtures("fp32_attention")
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_yields_the_cpus_tokens(policy: str | None, setup: TinySetup) -> None:
    prompts = random_prompts(5, 1500, 60)
    params = [greedy(10), SamplingParams(temperature=0.8, seed=1, max_tokens=10, ignore_eos=True)] * 2 + [greedy(3)]
    outputs = {device: run_all(Engine(config_of(setup, device, policy)), prompts, params) for device in ("cpu", "npu")}
    assert tokens_of(outputs["npu"]) == tokens_of(outputs["cpu"])
    num_verified = sum(output.speculation.num_verified_tokens for output in outputs["npu"])
    assert (num_verified > 0) == (policy is not None)


@pytest.mark.usefixtures("fp32_attention")
def test_accepted_drafts_are_the_cpus_tokens(setup: TinySetup) -> None:
    prompts, params = random_prompts(3, 1500, 60), greedy(24)
    expected = run_all(Engine(config_of(setup, "cpu", None)), prompts, params)
    config = config_of(setup, "npu", "fixed")
    loaded = load_engine(config)
    runner = loaded.runner
    runner.__class__ = OracleRunner
    assert isinstance(runner, OracleRunner)
    answers = zip(prompts, expected, strict=True)
    runner.continuations = {tuple(prompt): output.outputs[0].token_ids for prompt, output in answers}
    runner.accuracy, runner.accuracy_of, runner.rng = 0.7, {}, random.Random(0)
    outputs = run_all(Engine(config, loaded=loaded), prompts, params)
    assert tokens_of(outputs) == tokens_of(expected)
    for output in outputs:
        assert 0 < output.speculation.num_accepted_tokens < output.speculation.num_verified_tokens


@pytest.mark.usefixtures("fp32_attention")
def test_filters_penalties_and_shared_prefixes(setup: TinySetup) -> None:
    prompt = random_prompts(1, 1500, 150, seed=2)[0]
    prompts = [prompt, [*prompt, 5], [7] * 130 + prompt[:9], prompt[:1]]
    params = [
        SamplingParams(temperature=0.9, top_k=50, seed=1, max_tokens=10, ignore_eos=True, n=2, logprobs=3),
        SamplingParams(temperature=1.0, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.3, seed=2, max_tokens=10),
        SamplingParams(temperature=0.7, top_p=0.8, repetition_penalty=1.3, seed=4, max_tokens=10, min_tokens=5),
        SamplingParams(temperature=0.0, max_tokens=10, logit_bias={5: 3.0, 7: -2.0}),
    ]
    outputs = {d: run_all(Engine(config_of(setup, d, "fixed")), prompts, params) for d in ("cpu", "npu")}
    assert tokens_of(outputs["npu"]) == tokens_of(outputs["cpu"])


@pytest.mark.usefixtures("fp32_attention")
def test_a_preempted_sequence_is_recomputed(setup: TinySetup) -> None:
    prompts, params = [[5 + i] * 110 for i in range(4)], greedy(30)
    config = {"num_kv_blocks": 5, "max_model_len": 256, "max_num_batched_tokens": 512}
    outputs = {}
    for device in ("cpu", "npu"):
        engine = Engine(config_of(setup, device, "fixed", **config))
        outputs[device] = run_all(engine, prompts, params)
        assert engine.stats().num_preemptions > 0
    assert tokens_of(outputs["npu"]) == tokens_of(outputs["cpu"])


def test_bf16_is_the_default_and_runs_on_kernels_alone(setup: TinySetup) -> None:
    engine = Engine(config_of(setup, "npu", "fixed", dtype="auto", block_size=None))
    assert (engine.info.dtype, engine.info.block_size) == ("bfloat16", 128)
    assert set(engine.info.op_table.values()) == {"native"}
    (output,) = run_all(engine, [[5, 6, 7]], greedy(12))
    assert len(output.outputs[0].token_ids) == 12
    assert output.speculation.num_verified_tokens > 0
