# SPDX-License-Identifier: Apache-2.0
"""Prefix-cache hits and shared prompts change neither tokens nor acceptance, and shared blocks are never written."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.request import RequestOutput, SamplingParams
from tests.engines import TinySetup, oracle_engine, random_prompts, run_all, step_until_done, tiny_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def setup(tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup("qwen3")


def _noisy(setup: TinySetup, prompts: list[list[int]], config: EngineConfig) -> Engine:
    outputs = run_all(tiny_engine(setup, None, EngineConfig(num_kv_blocks=100)), prompts, PARAMS)
    continuations = {tuple(p): o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)}
    return oracle_engine(setup, continuations, 0.7, config)


def _observed(output: RequestOutput) -> tuple[list[int], float, int]:
    stats = output.speculation
    return output.outputs[0].token_ids, stats.acceptance_length, stats.num_accepted_tokens


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("length", [8, 16, 17, 31, 32])
def test_a_hit_changes_neither_tokens_nor_acceptance(setup: TinySetup, block_size: int, length: int) -> None:
    """Real drafter, so acceptance depends on the drafter's KV in the cached blocks; full-prompt hits included."""
    shared = random_prompts(1, 97, 60, seed=9)[0]
    prompt = (shared * 9)[:length]
    config = EngineConfig(verify_policy="fixed", num_kv_blocks=100, block_size=block_size)
    engine = tiny_engine(setup, "random", config)
    drafts: list[list[list[int]]] = []
    record = engine._runner.draft

    def recording(drafting, num_drafts):  # type: ignore[no-untyped-def]
        result = record(drafting, num_drafts)
        drafts[-1].extend(result.token_ids)
        return result

    engine._runner.draft = recording  # type: ignore[method-assign]
    outputs = []
    for _ in range(3):
        drafts.append([])
        outputs += run_all(engine, [prompt], PARAMS)
    assert outputs[0].usage.num_cached_tokens == 0
    expected = length - 1 if length % block_size == 0 else length // block_size * block_size
    assert [o.usage.num_cached_tokens for o in outputs[1:]] == [expected] * 2
    assert _observed(outputs[1]) == _observed(outputs[2]) == _observed(outputs[0])
    assert drafts[0] == drafts[1] == drafts[2], "the same drafts are proposed from cached drafter KV"
    assert len(drafts[0]) > 0


def test_blocks_without_drafter_kv_are_no_hit_for_a_drafting_request(setup: TinySetup) -> None:
    prompt = random_prompts(1, 97, 60, seed=4)[0] * 3
    engine = tiny_engine(setup, "random", EngineConfig(verify_policy="off", num_kv_blocks=100, block_size=4))
    plain = run_all(engine, [prompt], PARAMS)[0]
    engine.set_verify_policy("fixed")
    drafted = run_all(engine, [prompt], PARAMS)[0]
    assert drafted.usage.num_cached_tokens == 0
    assert drafted.speculation.num_verified_tokens > 0
    again = run_all(engine, [prompt], PARAMS)[0]
    assert again.usage.num_cached_tokens > 0, "now they hold the drafter's rows too"
    assert plain.outputs[0].token_ids == drafted.outputs[0].token_ids == again.outputs[0].token_ids


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_samples_of_one_prompt_equal_separate_requests(setup: TinySetup, block_size: int, caching: bool) -> None:
    prompts = random_prompts(6, 97, 20, seed=2)
    sampled = SamplingParams(temperature=1.0, max_tokens=10, seed=5, n=5, ignore_eos=True)
    config = EngineConfig(
        verify_policy="fixed",
        num_kv_blocks=600 // block_size,
        block_size=block_size,
        max_model_len=64,
        max_num_seqs=7,
        enable_prefix_caching=caching,
    )
    engine = tiny_engine(setup, "random", config)
    grouped = run_all(engine, prompts, sampled)
    plain = run_all(tiny_engine(setup, None, EngineConfig(num_kv_blocks=300)), prompts, sampled)
    assert [[o.token_ids for o in r.outputs] for r in grouped] == [[o.token_ids for o in r.outputs] for r in plain]
    assert all(len({tuple(o.token_ids) for o in r.outputs}) > 1 for r in grouped)
    assert all(r.usage.num_output_tokens == 50 for r in grouped)


def _checksums(engine: Engine) -> dict[tuple[int, int], bytes]:
    """Contents of every cached block: they must never change while cached."""
    blocks = engine._blocks
    kv = engine._runner._target_kv
    draft_kv = engine._runner._draft_kv
    assert draft_kv is not None
    state: dict[tuple[int, int], bytes] = {}
    for block, cached in enumerate(blocks._blocks):
        if cached.uid is not None:
            index = (block, cached.uid)
            target = b"".join(cache[block].numpy().tobytes() for cache in [*kv.k, *kv.v])
            drafter = b"".join(cache[block].numpy().tobytes() for cache in [*draft_kv.k, *draft_kv.v])
            state[index] = target + (drafter if cached.context_id is not None else b"")
    return state


@pytest.mark.parametrize("seed", range(200))
def test_cached_blocks_are_never_written(setup: TinySetup, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [p[: rng.randint(1, len(p))] for p in random_prompts(2, 97, 16, seed=seed) for _ in range(3)]
    config = EngineConfig(
        verify_policy="fixed",
        block_size=rng.choice([2, 4]),
        num_kv_blocks=rng.choice([14, 20, 40]),
        max_model_len=26,
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([6, 64]),
    )
    engine = tiny_engine(setup, "random", config)
    for prompt in prompts:
        params = replace(PARAMS, max_tokens=rng.randint(1, 10), n=rng.choice([1, 1, 3]), temperature=1.0, seed=seed)
        engine.add_request(prompt, params)
    known: dict[tuple[int, int], bytes] = {}

    def check(_: int) -> None:
        nonlocal known
        current = _checksums(engine)
        for index, content in known.items():
            assert current.get(index, content)[: len(content)] == content, f"cached block {index} was written"
        known = current

    step_until_done(engine, check)
    check(0)
    assert len(known) > 0
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    assert stats.num_verified_tokens > 0 or all(len(p) > 24 for p in prompts)
