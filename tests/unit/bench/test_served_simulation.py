# SPDX-License-Identifier: Apache-2.0
"""The simulation of served turns: as many tokens, the same requests, and a policy that keeps only what it learned."""

import sys

import numpy as np
import pytest
from served_simulation import CurrentCosts, ServedSimulation, SimulatedArms
from served_steps import ArmSteps, ServedStep

from adaflash.simulate.acceptance import Answer, RepeatedAnswers
from adaflash.simulate.costs import MeasuredCosts
from adaflash.simulate.policies import Off, make_policy
from adaflash.simulate.simulation import Load
from adaflash.speculative.cost_model import CostModel
from adaflash.speculative.cost_table import CostSample

K, PROMPT = 7, 20


def cost_model(base_s=0.01):
    verify = [CostSample(n, 0, 0, base_s + n * 1e-3) for n in (1, 64)]
    return CostModel.from_samples(verify, [CostSample(n, 0, 0, 0.002 + n * 1e-4) for n in (1, 64)], 2048, 64)


def answers(num_matched=3):
    """Answers of 64 tokens in which so many drafts are right everywhere, with confidence where they are."""
    confidence = np.where(np.arange(K) < num_matched, 0.9, 0.1).astype(np.float32)
    return RepeatedAnswers([Answer(PROMPT, np.tile(confidence, (63, 1)), np.full(63, num_matched), None)])


def served(num_warmup_tokens, *turns):
    """Turns of so many tokens."""
    steps = [[ServedStep(0, 0, 0, 0, 0.0, 0, 0, 0.0, False, n)] for n in turns]
    return ArmSteps(num_warmup_tokens, steps, 0)


def simulation(policy, concurrency, model=None, num_matched=3):
    load = Load(sys.maxsize, concurrency, max_num_seqs=concurrency, max_num_batched_tokens=2048)
    return ServedSimulation(load, answers(num_matched), MeasuredCosts(model or cost_model()), policy, K)


def test_a_turn_has_as_many_tokens_and_takes_what_its_steps_cost():
    slices = simulation(Off(), 1).turns(served(1, 10, 20))
    assert [part.num_tokens for part in slices] == [10, 20]
    assert [part.num_rounds for part in slices] == [10, 20]
    assert [part.seconds for part in slices] == pytest.approx([10 * 0.011, 20 * 0.011])
    assert [part.num_decode_steps for part in slices] == [10, 20]
    assert [part.num_draft_steps for part in slices] == [0, 0]


def test_what_a_step_gives_too_much_the_next_turn_has_less():
    policy = make_policy("fixed:3", K + 1, False, cost_model())
    slices = simulation(policy, 1).turns(served(1, 6, 6, 4))  # four tokens a step
    assert [part.num_tokens for part in slices] == [8, 4, 4]
    assert [part.num_verified_tokens for part in slices] == [6, 3, 3]
    assert [part.num_draft_steps for part in slices] == [2, 1, 1]


def test_first_requests_are_as_short_as_the_served_ones():
    """Of four users the first has 16 tokens; after 15 steps of decoding its next prompt is computed beside the rest."""
    slices = simulation(Off(), 4).turns(served(4, 60, 4, 4))
    assert [part.num_tokens - part.num_emitted_tokens for part in slices] == [0, 1, 0]
    assert [part.num_tokens for part in slices] == [60, 4, 4]
    assert slices[1].seconds == pytest.approx(0.01 + (3 + PROMPT) * 1e-3)


def test_nothing_is_measured_of_the_warm_up():
    (whole,) = simulation(Off(), 1).turns(served(0, 30))
    (warm,) = simulation(Off(), 1).turns(served(10, 20))
    assert whole.num_tokens == warm.num_tokens + 10
    assert warm.seconds == pytest.approx(20 * 0.011)
    assert whole.seconds == pytest.approx(29 * 0.011 + 0.01 + PROMPT * 1e-3)


def test_every_request_is_forgotten_in_the_end():
    class Remembering(Off):
        def __init__(self):
            self.seen, self.forgotten = set(), []

        def select(self, batch):
            self.seen |= set(batch.keys)
            return super().select(batch)

        def forget(self, key):
            self.forgotten.append(key)

    policy = Remembering()
    simulation(policy, 4).turns(served(4, 300))
    assert len(policy.seen) > 4
    assert sorted(policy.forgotten) == sorted(policy.seen)


def test_a_policy_that_learned_decides_by_the_costs_of_the_moment():
    """Drafts that are right pay where a step is dear, and not where a draft costs more than a step."""
    dear = cost_model()
    cheap = CostModel.from_samples(
        [CostSample(1, 0, 0, 1e-4), CostSample(64, 0, 0, 2e-4)], [CostSample(1, 0, 0, 0.1)], 2048, 64
    )
    current = CurrentCosts(dear)
    policy = make_policy("goodput", K + 1, False, current)
    (learning,) = simulation(policy, 1, dear).turns(served(64, 400))
    assert learning.num_draft_steps > 0.9 * learning.num_decode_steps
    current.costs = cheap
    (later,) = simulation(policy, 1, cheap).turns(served(64, 400))
    assert later.num_draft_steps < 0.1 * later.num_decode_steps


def arm_turns(arms, believed=None, believing=False):
    """Two concurrencies of 100 tokens each, with right drafts; the share of steps that draft in the second."""
    models = dict.fromkeys(arms, cost_model())
    simulated = SimulatedArms(arms, answers(), K, 2048, believing)
    plain = [[ServedStep(1, 1, 0, 50, 0.0, 0, 0, 0.0, False, 100)]]
    steps = dict.fromkeys(arms, ArmSteps(64, plain, 0, believed))
    simulated.turns(1, steps, models)
    turns = simulated.turns(2, steps, models)
    return {arm: parts[0].num_draft_steps / parts[0].num_decode_steps for arm, parts in turns.items()}


def test_arms_are_simulated_at_one_concurrency_after_the_other():
    shares = arm_turns(["off", "fixed:3", "goodput"])
    assert (shares["off"], shares["fixed:3"]) == (0.0, 1.0)
    assert shares["goodput"] > 0.9


def test_a_policy_that_believes_other_costs_decides_by_them_whatever_their_scale():
    dear_drafts = CostModel.from_samples(
        [CostSample(n, 0, 0, 7 * (0.01 + n * 1e-3)) for n in (1, 64)], [CostSample(1, 0, 0, 1.0)], 2048, 64
    ).to_json()
    same = CostModel.from_samples(
        [CostSample(n, 0, 0, 7 * (0.01 + n * 1e-3)) for n in (1, 64)],
        [CostSample(n, 0, 0, 7 * (0.002 + n * 1e-4)) for n in (1, 64)],
        2048,
        64,
    ).to_json()
    assert arm_turns(["goodput"], dear_drafts)["goodput"] > 0.9
    assert arm_turns(["goodput"], dear_drafts, believing=True)["goodput"] < 0.1
    assert arm_turns(["goodput"], same, believing=True) == arm_turns(["goodput"])
