# SPDX-License-Identifier: Apache-2.0
"""No drafter, policy, concurrency or KV pressure changes a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.request import SamplingParams
from tests.engines import (
    TinySetup,
    oracle_engine,
    random_prompts,
    run_all,
    tiny_engine,
    transformers_greedy,
    unexcused_difference,
)

VOCAB = 97
NUM_PROMPTS = 200
POLICIES = ("off", "fixed", "confidence", "length_head", "goodput")
MAX_TOKENS = 14
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
DRAFTERS = ("random", "zero", "right")
CONFIDENCE_THRESHOLD = 0.5 / VOCAB  # A uniform distribution passes for one draft.
PROMPTS = random_prompts(NUM_PROMPTS, VOCAB, 30)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def setup(request: pytest.FixtureRequest, tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup(request.param)


@pytest.fixture(scope="module")
def expected(setup: TinySetup) -> list[list[int]]:
    return [transformers_greedy(setup.model, prompt, MAX_TOKENS) for prompt in PROMPTS]


def _engine(setup: TinySetup, expected: list[list[int]], drafter: str, config: EngineConfig) -> Engine:
    if drafter in ("right", "noisy"):
        continuations = {tuple(prompt): output for prompt, output in zip(PROMPTS, expected, strict=True)}
        return oracle_engine(setup, continuations, 1.0 if drafter == "right" else 0.7, config)
    return tiny_engine(setup, drafter, config)


@pytest.mark.parametrize("concurrency", [1, 8, 32])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_equals_transformers(
    setup: TinySetup, expected: list[list[int]], drafter: str, policy: str, concurrency: int
) -> None:
    config = EngineConfig(
        verify_policy=policy,
        max_num_seqs=concurrency,
        num_kv_blocks=200,
        max_num_batched_tokens=256,
        confidence_threshold=CONFIDENCE_THRESHOLD,
    )
    engine = _engine(setup, expected, drafter, config)
    outputs = run_all(engine, PROMPTS, GREEDY)
    differences = [
        unexcused_difference(setup.model, prompt, want, output.outputs[0].token_ids)
        for prompt, want, output in zip(PROMPTS, expected, outputs, strict=True)
    ]
    assert [d for d in differences if d is not None] == []
    stats = engine.stats()
    assert (stats.num_verified_tokens > 0) == (policy != "off"), "the policy decides whether speculation ran"
    if drafter == "right" and policy == "fixed":
        assert stats.num_accepted_tokens > 0.7 * stats.num_verified_tokens


@pytest.mark.parametrize("policy", ["fixed", "goodput"])
@pytest.mark.parametrize("drafter", ["random", "noisy"])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_kv_exhaustion_and_tiny_steps_change_no_token(
    setup: TinySetup, drafter: str, block_size: int, policy: str
) -> None:
    """A pool for two or three sequences, prefill in chunks of a few tokens: preemption and recompute must happen."""
    prompts, params = PROMPTS[:40], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    plain = run_all(tiny_engine(setup, None, EngineConfig(num_kv_blocks=300)), prompts, params)
    wanted = [output.outputs[0].token_ids for output in plain]
    config = EngineConfig(
        verify_policy=policy,
        max_num_seqs=8,
        max_num_batched_tokens=11,
        max_model_len=64,
        block_size=block_size,
        num_kv_blocks=-(-100 // block_size),
    )
    continuations = {tuple(prompt): output for prompt, output in zip(prompts, wanted, strict=True)}
    engine = (
        tiny_engine(setup, drafter, config) if drafter == "random" else oracle_engine(setup, continuations, 0.7, config)
    )
    outputs = run_all(engine, prompts, params)
    differences = [
        unexcused_difference(setup.model, prompt, want, output.outputs[0].token_ids)
        for prompt, want, output in zip(prompts, wanted, outputs, strict=True)
    ]
    assert [d for d in differences if d is not None] == []
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_verified_tokens > 0


SAMPLED = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    max_tokens=MAX_TOKENS,
)


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("drafter", ["random", "noisy"])
def test_sampled_output_equals_plain_decoding_per_seed(
    setup: TinySetup, expected: list[list[int]], drafter: str, policy: str
) -> None:
    prompts = PROMPTS[:60]
    params = [replace(SAMPLED, seed=seed, n=1 + seed % 3, logit_bias={5: 2.0}, min_tokens=4) for seed in range(60)]
    plain = run_all(tiny_engine(setup, None, EngineConfig(num_kv_blocks=300)), prompts, params)
    config = EngineConfig(
        verify_policy=policy, max_num_seqs=16, num_kv_blocks=300, confidence_threshold=CONFIDENCE_THRESHOLD
    )
    engine = _engine(setup, expected, drafter, config)
    outputs = run_all(engine, prompts, params)
    assert [[o.token_ids for o in r.outputs] for r in outputs] == [[o.token_ids for o in r.outputs] for r in plain]
    assert engine.stats().num_verified_tokens > 0
    assert len({tuple(o.token_ids) for r in plain if len(r.outputs) == 3 for o in r.outputs}) > 30, "samples differ"
