# SPDX-License-Identifier: Apache-2.0
"""Simulated against measured: which rounds count, and what part of an error is time, what part behaviour."""

from dataclasses import replace

import pytest
from comparison import compare, line, verdict
from served_steps import ArmSteps, ServedStep
from turns import Round, Slice

from adaflash.speculative.cost_model import CostModel
from adaflash.speculative.cost_table import CostSample

REST_S, DRAFT_S = 0.02, 0.01


def model(rest_s=REST_S, draft_s=DRAFT_S):
    """Steps that take the same whatever their size."""
    return CostModel.from_samples([CostSample(1, 0, 0, rest_s)], [CostSample(1, 0, 0, draft_s)], 64, 64)


def plain(num_steps):
    return [ServedStep(1, 1, 0, 50, REST_S, 0, 0, 0.0, False, 1)] * num_steps


def drafting(num_steps, num_emitted=3):
    return [ServedStep(1, 4, 0, 50, REST_S, 4, 50, DRAFT_S, False, num_emitted)] * num_steps


def turn(steps):
    """What an arm's turn of these steps adds up to, one sequence decoding."""
    num_tokens, num_drafting = sum(s.num_emitted for s in steps), sum(s.num_draft_rows > 0 for s in steps)
    seconds = sum(s.rest_s + s.draft_s for s in steps)
    verified = sum(s.num_tokens - 1 for s in steps)
    return Slice(seconds, num_tokens, len(steps), num_tokens, verified, len(steps), num_drafting)


def compared(steps, models, simulated=None):
    """Compare turns given by arm with simulated ones; without those the simulation did what was served."""
    num_rounds = len(steps["off"])
    served = {arm: ArmSteps(0, turns, 0) for arm, turns in steps.items()}

    rounds = [Round(0, {arm: turn(turns[index]) for arm, turns in steps.items()}) for index in range(num_rounds)]
    turns = {arm: [turn(one) for one in listed] for arm, listed in (simulated or steps).items()}
    cells = compare(4, rounds, turns, served, models, seed=0)
    return {cell.measured.arm: cell for cell in cells}


def both(one):
    return {"off": one, "fixed:3": one}


def test_a_simulation_that_is_right_has_no_error():
    cells = compared({"off": [plain(10)] * 4, "fixed:3": [drafting(8)] * 4}, both(model()))
    cell = cells["fixed:3"]
    assert cell.measured.to_off.value == pytest.approx(2.0)
    assert (cell.error, cell.time_error, cell.behaviour_error) == pytest.approx((0, 0, 0))
    assert cell.taken == pytest.approx(cell.priced)
    assert cells["off"].error == pytest.approx(0)


def test_a_wrong_price_is_an_error_of_time_alone():
    steps = {"off": [plain(10)] * 4, "fixed:3": [drafting(8)] * 4}
    dear = model(draft_s=2 * DRAFT_S)  # 3 tokens take 40 ms, not 30
    simulated = {"off": [plain(10)] * 4, "fixed:3": [[s._replace(draft_s=2 * DRAFT_S) for s in drafting(8)]] * 4}
    cell = compared(steps, both(dear), simulated)["fixed:3"]
    assert cell.time_error == pytest.approx(-1 / 4)
    assert cell.behaviour_error == pytest.approx(0)
    assert cell.error == pytest.approx(-1 / 4)


def test_other_steps_are_an_error_of_behaviour_alone():
    steps = {"off": [plain(10)] * 4, "fixed:3": [drafting(8)] * 4}
    cell = compared(steps, both(model()), {**steps, "fixed:3": [drafting(12, num_emitted=2)] * 4})["fixed:3"]
    assert cell.time_error == pytest.approx(0)
    assert cell.behaviour_error == pytest.approx(-1 / 3)
    assert (cell.measured.acceptance_length, cell.simulated.acceptance_length) == (3.0, 2.0)


def test_both_errors_make_up_the_whole():
    steps = {"off": [plain(10)] * 4, "fixed:3": [drafting(8)] * 4}
    cell = compared(steps, both(model(0.03, 0.02)), {**steps, "fixed:3": [drafting(12, 2)] * 4})["fixed:3"]
    assert cell.time_error != pytest.approx(0)
    assert 1 + cell.error == pytest.approx((1 + cell.time_error) * (1 + cell.behaviour_error))


def test_the_rounds_that_gave_the_costs_do_not_count():
    seen, unseen = [drafting(1, num_emitted=1), drafting(8)], [drafting(50, num_emitted=7), drafting(8)]
    figures = [
        compared({"off": [plain(10)] * 4, "fixed:3": 2 * turns}, both(model()))["fixed:3"] for turns in (seen, unseen)
    ]
    assert figures[0] == figures[1]
    assert figures[0].measured.num_rounds == 2


def test_every_arm_is_priced_with_its_own_costs():
    steps = {"off": [plain(10)] * 4, "fixed:3": [drafting(8)] * 4}
    cell = compared(steps, {"off": model(), "fixed:3": model(2 * REST_S, 2 * DRAFT_S)})["fixed:3"]
    assert cell.time_error == pytest.approx(-1 / 2)


def test_a_line_says_what_was_measured_simulated_and_wrong():
    steps = {"off": [plain(10)] * 4, "fixed:3": [drafting(8)] * 4}
    cell = compared(steps, both(model()), {**steps, "fixed:3": [drafting(12, 2)] * 4})["fixed:3"]
    words = line(cell).split()
    assert words[:6] == ["fixed:3", "2.00", "(2.00-2.00)", "1.33", "-33.3%", "+0.0%"]
    assert words[6:] == ["-33.3%", "3.00", "2.00", "1.00", "1.50", "100%", "100%"]


def test_the_verdict_counts_arms_that_are_close_and_names_the_worst():
    steps = {"off": [plain(10)] * 4, "fixed:3": [drafting(8)] * 4}
    close = compared(steps, both(model(draft_s=1.1 * DRAFT_S)), steps)
    far = compared(steps, both(model()), {**steps, "fixed:3": [drafting(12, 2)] * 4})
    assert verdict([*close.values(), *far.values()]) == (
        "1 of 2 speedups within 10%; largest error -33.3%, fixed:3 at 4"
    )
    told = replace(far["fixed:3"], believing=True)
    assert verdict([close["fixed:3"], told]).startswith("1 of 1 speedups")
    assert line(told).startswith("fixed:3* ")
    assert verdict([close["off"]]) == "nothing but off was measured"
