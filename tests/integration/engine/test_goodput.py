# SPDX-License-Identifier: Apache-2.0
"""The policy `goodput` in a real engine: context that was put off, switches of the policy, limits, and its reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from adaflash.config import EngineConfig
from adaflash.engine.context_backlog import ContextBacklog
from adaflash.engine.engine import Engine
from adaflash.engine.runner import Drafts, Round, Verified
from adaflash.engine.scheduler import ScheduledSequence
from adaflash.engine.sequence import Sequence
from adaflash.errors import RequestError
from adaflash.request import SamplingParams
from adaflash.speculative.allocation import FloatArray, IntArray
from tests.engines import TinySetup, random_prompts, run_all, step_until_done, tiny_engine

VOCAB = 97
MAX_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
PROMPTS = random_prompts(6, VOCAB, 30)
# What a draft said, by prompt and number of output tokens: confidences and length ratio.
Said = dict[tuple[tuple[int, ...], int], tuple[list[float], float]]


@pytest.fixture(scope="module")
def setup(tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup("qwen3")


def engine_of(setup: TinySetup, policy: str, **settings: object) -> Engine:
    values = {"verify_policy": policy, "num_kv_blocks": 200, "max_num_seqs": 4, **settings}
    return tiny_engine(setup, "random", EngineConfig.from_mapping(values))


def drafts_said(engine: Engine) -> Said:
    """Record what the drafter says from now on, in whole blocks."""
    said: Said = {}
    draft = engine._runner.draft

    def recorded(drafting: list[ScheduledSequence], num_drafts: int) -> Drafts:
        drafts = draft(drafting, max(num_drafts, engine._speculation.draft_width))
        ratios = drafts.signals.length_ratio or [0.0] * len(drafting)
        for item, confidence, ratio in zip(drafting, drafts.signals.confidence, ratios, strict=True):
            said[tuple(item.seq.request.prompt_token_ids), item.seq.num_output_tokens] = (confidence, ratio)
        return drafts

    engine._runner.draft = recorded  # type: ignore[method-assign]
    return said


def draft_every(engine: Engine, interval: int) -> None:
    """Let a sequence draft once in so many tokens."""

    def select(decoding: list[Sequence], most: list[int], _: int) -> list[int]:
        return [count if seq.num_tokens % interval == 0 else 0 for seq, count in zip(decoding, most, strict=True)]

    engine._scheduler.select = select


def same(one: Said, other: Said) -> Iterator[bool]:
    for key in one.keys() & other.keys():
        yield torch.allclose(torch.tensor(one[key][0]), torch.tensor(other[key][0]), atol=1e-4)
        yield abs(one[key][1] - other[key][1]) < 1e-4


@pytest.mark.parametrize("num_rows", [8192, 5])
@pytest.mark.parametrize("block_size", [4, 16])
def test_context_that_was_put_off_is_that_which_was_not(setup: TinySetup, num_rows: int, block_size: int) -> None:
    always = engine_of(setup, "fixed", block_size=block_size)
    expected_said = drafts_said(always)
    expected = run_all(always, PROMPTS, GREEDY)
    engine = engine_of(setup, "goodput", block_size=block_size)
    runner = engine._runner
    assert runner.drafter is not None
    taps_size = len(runner.drafter.tap_layer_ids) * runner.target.config.hidden_size
    runner.backlog = ContextBacklog(
        taps_size, torch.float32, torch.device("cpu"), min_rows=4, max_bytes=num_rows * taps_size * 4
    )
    draft_every(engine, 7)
    said = drafts_said(engine)
    outputs = run_all(engine, PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    checks = list(same(said, expected_said))
    assert len(checks) > 20
    assert all(checks)
    assert runner.backlog.num_free == num_rows, "what was put off is written or dropped"


def test_the_policy_can_be_switched_between_any_two_steps(setup: TinySetup) -> None:
    expected = run_all(engine_of(setup, "off"), PROMPTS, GREEDY)
    engine = engine_of(setup, "goodput")
    said, number = drafts_said(engine), 0
    for prompt in PROMPTS:
        engine.add_request(prompt, GREEDY, str(number))
        number += 1
    tokens: dict[str, list[int]] = {str(i): [] for i in range(number)}
    policies = ["off", "goodput", "fixed", "goodput", "confidence", "goodput"]
    for step in range(10_000):
        if not engine.has_unfinished():
            break
        engine.set_verify_policy(policies[step // 3 % len(policies)])
        for delta in engine.step():
            tokens[delta.request_id] += delta.outputs[0].token_ids
    assert list(tokens.values()) == [o.outputs[0].token_ids for o in expected]
    assert said
    assert engine._runner.backlog is not None
    assert engine._runner.backlog.num_free == engine._runner.backlog.num_rows
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks


def test_a_follow_up_takes_what_was_decoded_plainly_from_the_cache(setup: TinySetup) -> None:
    engine = engine_of(setup, "goodput", block_size=4)
    engine._scheduler.select = lambda decoding, most, _: [0] * len(most)
    prompt = PROMPTS[0]
    first = run_all(engine, [prompt], GREEDY)[0]
    follow_up = prompt + first.outputs[0].token_ids + [1, 2, 3]
    engine._speculation._goodput.is_drafting = False  # type: ignore[union-attr]
    second = run_all(engine, [follow_up], GREEDY)[0]
    assert second.usage.num_cached_tokens >= len(follow_up) - 4 - 4
    engine.set_verify_policy("fixed")
    third = run_all(engine, [follow_up], GREEDY)[0]
    assert third.usage.num_cached_tokens < second.usage.num_cached_tokens, "rows it needs to draft were never written"
    assert third.outputs[0].token_ids == second.outputs[0].token_ids
    assert third.speculation.num_verified_tokens > 0


def test_replies_and_statistics_say_what_was_done(setup: TinySetup) -> None:
    engine = engine_of(setup, "goodput")
    outputs = run_all(engine, PROMPTS, GREEDY)
    stats = engine.stats()
    for output in outputs:
        speculation = output.speculation
        assert speculation.verify_policy == "goodput"
        assert sum(k * count for k, count in enumerate(speculation.verify_lens)) == speculation.num_verified_tokens
        assert speculation.num_plain_rounds == speculation.num_rounds - sum(speculation.verify_lens)
        assert speculation.verify_s > 0
        assert speculation.host_s > 0
        assert (speculation.draft_s > 0) >= (sum(speculation.verify_lens) > 0)
    assert sum(sum(o.speculation.verify_lens) for o in outputs) == sum(stats.verify_lens) == stats.num_drafts > 0
    expected = sum(o.speculation.expected_accepted_tokens for o in outputs)
    assert stats.expected_accepted_tokens == pytest.approx(expected)
    assert 0 < stats.expected_accepted_tokens <= stats.num_verified_tokens
    assert 0 < stats.num_plain_steps < stats.num_steps


def test_a_limit_below_a_plain_step_forbids_drafts(setup: TinySetup) -> None:
    engine = engine_of(setup, "goodput")
    hurried = SamplingParams(temperature=0.0, max_tokens=20, max_inter_token_ms=1e-3)
    assert run_all(engine, PROMPTS, hurried)[0].speculation.num_drafted_tokens == 0
    relaxed = SamplingParams(temperature=0.0, max_tokens=20, max_inter_token_ms=1e6)
    assert sum(o.speculation.num_drafted_tokens for o in run_all(engine, PROMPTS, relaxed)) > 0


class _RowCosts:
    """A step takes a millisecond per row; drafting is free."""

    def verify_s(self, num_seqs: int, num_tokens: IntArray, num_context: int) -> FloatArray:
        return 1e-3 * num_tokens

    def draft_s(self, num_seqs: IntArray, *_: object) -> FloatArray:
        return np.zeros(len(num_seqs))


def test_prompts_beside_a_limit_come_in_chunks_and_change_no_token(setup: TinySetup) -> None:
    prompts = [[5, 6, 7], *random_prompts(3, VOCAB, 60, seed=1)]
    expected = [output.outputs[0].token_ids for output in run_all(engine_of(setup, "off"), prompts, GREEDY)]
    engine = engine_of(setup, "goodput", block_size=4)
    engine._scheduler.costs = _RowCosts()
    limited = replace(GREEDY, max_inter_token_ms=12.0)
    engine.submit(engine.prepare(prompts[0], limited, "0"))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    num_rows: list[int] = []
    verify = engine._runner.verify

    def counted(rounds: list[Round], drafts: Drafts | None) -> list[Verified]:
        num_rows.append(sum(r.scheduled.num_tokens for r in rounds))
        return verify(rounds, drafts)

    engine._runner.verify = counted  # type: ignore[method-assign]

    def step(number: int) -> None:
        if number == 3:
            for i, prompt in enumerate(prompts[1:], 1):
                engine.submit(engine.prepare(prompt, GREEDY, str(i)))

    for delta in step_until_done(engine, step):
        tokens[delta.request_id] += delta.outputs[0].token_ids
    assert list(tokens.values()) == expected
    assert sum(map(len, prompts[1:])) > 60
    assert max(num_rows) == 12, "the largest chunk that keeps the limit"
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf"), "fast"])
def test_a_limit_that_is_none_is_refused(limit: float) -> None:
    with pytest.raises(RequestError, match=r"max_inter_token_ms.*finite number > 0"):
        SamplingParams(max_inter_token_ms=limit)
