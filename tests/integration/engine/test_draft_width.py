# SPDX-License-Identifier: Apache-2.0
"""Blocks narrower than the drafter was trained with: how many drafts are made, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.engine.sequence import Sequence
from adaflash.request import RequestOutput, SamplingParams
from tests.engines import TinySetup, random_prompts, run_all, tiny_engine

PROMPTS = random_prompts(8, 97, 20)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "sampled": SamplingParams(temperature=1.0, max_tokens=24, seed=3),
}


@pytest.fixture(scope="module")
def setup(tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup("llama")


def engine_of(setup: TinySetup, **settings: object) -> Engine:
    values = {"num_kv_blocks": 200, "max_num_seqs": 4, **settings}
    return tiny_engine(setup, "random", EngineConfig.from_mapping(values))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fixed", "confidence"])
def test_no_more_is_drafted_than_may_be_verified(setup: TinySetup, policy: str, num_drafts: int) -> None:
    engine = engine_of(setup, verify_policy=policy, num_speculative_tokens=num_drafts)
    run_all(engine, PROMPTS, SAMPLINGS["greedy"])
    stats = engine.stats()
    assert stats.num_drafts > 0
    assert stats.num_drafted_tokens == num_drafts * stats.num_drafts


def test_the_length_head_sees_whole_blocks(setup: TinySetup) -> None:
    engine = engine_of(setup, verify_policy="length_head", num_speculative_tokens=1)
    drafter = engine._runner.drafter
    assert drafter is not None
    run_all(engine, PROMPTS, SAMPLINGS["greedy"])
    stats = engine.stats()
    assert stats.num_drafted_tokens == (drafter.draft_block_size - 1) * stats.num_drafts > 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("coupling", ["gumbel", "rejection"])
def test_widths_may_change_from_step_to_step(setup: TinySetup, coupling: str, sampling: str) -> None:
    """The shared noise makes even sampled tokens those of plain decoding; rejection promises that for greedy ones."""
    params = SAMPLINGS[sampling]
    engine = engine_of(setup, verify_policy="goodput", sampling_coupling=coupling)
    widths: list[int] = []

    def select(decoding: list[Sequence], most: list[int], _: int) -> list[int]:
        widths.append(1 + len(widths) % 3)
        some = [(seq.key + len(widths)) % 3 > 0 for seq in decoding]
        return [min(count, widths[-1]) if drafts else 0 for drafts, count in zip(some, most, strict=True)]

    engine._scheduler.select = select
    outputs = run_all(engine, PROMPTS, params)
    stats = engine.stats()
    assert stats.num_drafts < stats.num_drafted_tokens < 3 * stats.num_drafts, "some narrow, some wide"
    assert [len(ids) for ids in tokens(outputs)] == [24] * len(PROMPTS)
    if coupling == "gumbel" or sampling == "greedy":
        assert tokens(outputs) == tokens(run_all(engine_of(setup, verify_policy="off"), PROMPTS, params))
