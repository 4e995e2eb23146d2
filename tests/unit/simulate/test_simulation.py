# SPDX-License-Identifier: Apache-2.0
"""The simulated server: nothing is lost, time is what the costs say, and policies rank as they must."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.errors import ConfigError
from adaflash.simulate.acceptance import Answer, Answers, RepeatedAnswers
from adaflash.simulate.catalog import load_device, load_model
from adaflash.simulate.policies import Policy, make_policy
from adaflash.simulate.roofline import NO_PREFILL, PrefillWork, RooflineCosts
from adaflash.simulate.simulation import Load, Simulation
from adaflash.simulate.synthetic import SyntheticAnswers
from adaflash.simulate.tally import Outcome

QWEN = load_model("Qwen3-8B")
NUM_DRAFTS = QWEN.drafter.num_drafts
COSTS = RooflineCosts(load_device("H200"), QWEN)
POLICIES = ("off", "fixed", "fixed:3", "confidence", "length_head", "length_head_gated:1.3", "goodput", "oracle")


def simulate(policy: str, load: Load, answers: Answers, costs: RooflineCosts = COSTS) -> Outcome:
    return Simulation(load, answers, costs, make_policy(policy, NUM_DRAFTS + 1, True, costs), NUM_DRAFTS).run()


def made_up(acceptance_length: float, num_requests: int, context: int = 16, output_tokens: int = 128) -> Answers:
    return SyntheticAnswers(acceptance_length, NUM_DRAFTS, num_requests, context, output_tokens, 0)


def users(concurrency: int) -> Load:
    return Load(max(8, 3 * concurrency), concurrency=concurrency)


def speedup(policy: str, concurrency: int, acceptance_length: float) -> float:
    load = users(concurrency)
    answers = made_up(acceptance_length, load.num_requests)
    return simulate(policy, load, answers).tokens_per_s / simulate("off", load, answers).tokens_per_s


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_every_request_gets_exactly_what_it_asked_for(policy: str, data: st.DataObject) -> None:
    num_requests, output_tokens = data.draw(st.integers(4, 9)), data.draw(st.integers(2, 40))
    limit = data.draw(st.none() | st.integers(2, 40))
    rate = data.draw(st.none() | st.floats(1.0, 5000.0))
    load = Load(
        num_requests,
        None if rate is not None else data.draw(st.integers(1, num_requests // 2)),
        rate,
        limit,
        max_num_seqs=data.draw(st.integers(1, 8)),
        max_num_batched_tokens=data.draw(st.integers(8, 64)),
    )
    outcome = simulate(policy, load, made_up(3.4, num_requests, data.draw(st.integers(1, 90)), output_tokens))
    each = output_tokens if limit is None else min(limit, output_tokens)
    num_cut = load.concurrency if load.concurrency is not None and load.concurrency > 1 else 0
    cut = [max(2, round(share * each)) for share in np.random.default_rng(load.seed).random(num_cut)]
    assert outcome.num_tokens == sum(cut) + each * (num_requests - num_cut)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_figures(policy: str) -> None:
    load = Load(12, request_rate=40.0, seed=3)
    one, other = (simulate(policy, load, made_up(3.4, 12, 64, 32)) for _ in range(2))
    assert one == other
    assert simulate(policy, dataclasses.replace(load, seed=4), made_up(3.4, 12, 64, 32)) != one


def test_plain_decoding_of_one_user_takes_the_sum_of_its_steps() -> None:
    context, num_tokens, load = 200, 50, Load(4, concurrency=1)
    prefill = PrefillWork(1, context, 0, context * (context + 1) // 2)
    prefill_s = float(COSTS.step_s(0, np.array([0]), 0, prefill)[0])
    decode_s = sum(float(COSTS.step_s(1, np.array([1]), context + i, NO_PREFILL)[0]) for i in range(num_tokens - 1))
    outcome = simulate("off", load, made_up(3.4, 4, context, num_tokens))
    assert outcome.tokens_per_s == pytest.approx(num_tokens / (prefill_s + decode_s), rel=1e-9)
    assert outcome.acceptance_length == 1.0
    assert outcome.verified_per_token == 0.0
    assert outcome.plain_share == 1.0


def test_rounds_follow_a_recorded_answer() -> None:
    """Of 10 tokens: 3 drafts from the first, none from the 5th, then 2 of the 4 that remain are right, and the rest."""
    matched = np.array([3, 9, 9, 9, 0, 2, 9, 9, 15])
    answer = Answer(16, np.full((9, NUM_DRAFTS), 0.5, dtype=np.float32), matched, None)
    outcome = simulate("fixed", Load(2, concurrency=1), RepeatedAnswers([answer]))
    # What is measured ends with the last user's last request, so both answers count.
    assert outcome.num_tokens == 20
    assert outcome.acceptance_length == pytest.approx((4 + 1 + 3 + 1) / 4)
    verified = 8 + 4 + 3 + 0  # never more than what is left of the answer but for its bonus token
    assert outcome.verified_per_token == pytest.approx(verified / 10)


@pytest.mark.parametrize("policy", ["fixed", "oracle"])
def test_a_drafter_that_is_always_right_is_believed_to_the_end_of_the_answer(policy: str) -> None:
    answer = Answer(8, np.ones((64, NUM_DRAFTS), dtype=np.float32), np.full(64, NUM_DRAFTS), None)
    outcome = simulate(policy, Load(2, concurrency=1), RepeatedAnswers([answer]))
    assert outcome.acceptance_length == 16.0
    assert outcome.num_tokens == 130


@pytest.mark.parametrize("concurrency", [1, 16, 96])
@pytest.mark.parametrize("acceptance_length", [1.5, 3.4, 9.0])
def test_no_policy_beats_the_oracle(concurrency: int, acceptance_length: float) -> None:
    """Plain decoding may, by what a drafter that is loaded costs: it writes context for every prompt."""
    load = users(concurrency)
    answers = made_up(acceptance_length, load.num_requests)
    best = simulate("oracle", load, answers).tokens_per_s
    assert simulate("off", load, answers).tokens_per_s <= best / 0.985
    for policy in POLICIES[1:-1]:
        assert simulate(policy, load, answers).tokens_per_s <= best, policy


def test_the_gate_verifies_everything_up_to_48_requests_and_follows_the_head_above() -> None:
    few, many = users(16), users(96)
    for load, same in ((few, "fixed"), (many, "length_head")):
        answers = made_up(3.4, load.num_requests)
        gated, expected, other = (
            simulate(policy, load, answers)
            for policy in ("length_head_gated", same, "fixed" if same != "fixed" else "length_head")
        )
        closeness = [abs(gated.verified_per_token - one.verified_per_token) for one in (expected, other)]
        assert closeness[0] < 0.1 * closeness[1]


def test_all_15_drafts_lose_at_128_users_and_low_acceptance() -> None:
    assert speedup("fixed:15", 128, 3.4) < 1.0


def test_all_15_drafts_win_threefold_for_one_user_and_high_acceptance() -> None:
    assert speedup("fixed:15", 1, 7.0) > 3.0


@pytest.mark.parametrize("concurrency", [1, 32, 128])
def test_goodput_pays_little_for_finding_out_that_drafts_are_useless(concurrency: int) -> None:
    """In so short a run; over 4,096 tokens a user it is 1 % (docs/simulate.md)."""
    assert speedup("goodput", concurrency, 1.2) >= 0.96


@pytest.mark.parametrize("concurrency", [1, 32])
def test_goodput_wins_where_drafts_are_good(concurrency: int) -> None:
    assert speedup("goodput", concurrency, 7.09) > max(1.5, 0.98 * speedup("fixed", concurrency, 7.09))


def test_goodput_keeps_what_all_15_drafts_lose() -> None:
    assert speedup("goodput", 128, 3.4) >= 0.96 > 0.6 > speedup("fixed", 128, 3.4)


def test_a_prompt_longer_than_a_step_runs_in_chunks() -> None:
    load = Load(2, concurrency=1, max_num_seqs=8, max_num_batched_tokens=100)
    outcome = simulate("off", load, made_up(3.4, 2, context=250, output_tokens=2))
    assert outcome.num_tokens == 4
    assert outcome.num_steps == 2 * (3 + 1)


def test_arrivals_below_capacity_are_served_at_their_rate() -> None:
    load = Load(200, request_rate=5.0)
    outcome = simulate("off", load, made_up(3.4, 200, 64, 64))
    assert outcome.tokens_per_s == pytest.approx(5.0 * 64, rel=0.2)
    assert math.isclose(outcome.tokens_per_s * outcome.measured_s, 200 * 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"concurrency": 0}, "concurrency=0 is invalid: must be >= 1"),
        ({"concurrency": 9}, "num_requests=16 is invalid: must be >= 2 x concurrency, 18"),
        ({"request_rate": 1.0}, "give either concurrency or request_rate"),
        ({"concurrency": None, "request_rate": 0.0}, "request_rate=0.0 is invalid"),
        ({"max_output_tokens": 1}, "max_output_tokens=1 is invalid: must be >= 2"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens=7 is invalid: must be >= max_num_seqs=256"),
    ],
)
def test_an_impossible_load_is_refused(change: dict[str, float | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(Load(16, concurrency=1), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fixd", r"policy='fixd' is invalid: must be one of off, fixed\[:N\], .*did you mean 'fixed'"),
        ("fixed:16", r"must be in \[1, 15\]"),
        ("fixed:2.5", "fixed takes an integer"),
        ("confidence:x", r"must be in \[0, 1\]"),
        ("oracle:3", "oracle takes no number"),
    ],
)
def test_an_unknown_policy_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(text, 16, True, COSTS)


def test_a_length_head_needs_predictions() -> None:
    with pytest.raises(ConfigError, match="have no predictions of a length head"):
        make_policy("length_head", 16, False, COSTS)
    assert isinstance(make_policy("confidence", 16, False, COSTS), Policy)
