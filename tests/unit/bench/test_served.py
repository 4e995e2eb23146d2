# SPDX-License-Identifier: Apache-2.0
"""What was measured comes back from a file as it was."""

import json

import pytest
from served import Served
from served_steps import ArmSteps, ServedStep
from turns import Round, Slice

from adaflash.speculative.cost_model import CostModel
from adaflash.speculative.cost_table import CostSample


def measured():
    profile = CostModel.from_samples([CostSample(1, 1, 9, 0.1)], [CostSample(8, 0, 9, 0.2)], 64, 8)
    steps = [ServedStep(1, 4, 0, 50, 0.02, 4, 50, 0.01, True, 3), ServedStep(1, 40, 40, 0, 0.2, 0, 0, 0.0, False, 1)]
    arms = {"off": ArmSteps(3, [steps[1:], steps], 2), "goodput": ArmSteps(5, [steps, steps], 4, profile.to_json())}
    rounds = [Round(0, {arm: Slice(1.5 + i, 7, 6, 5, 4, 3, 2) for i, arm in enumerate(arms)}) for _ in range(2)]
    return Served(4, rounds, arms, profile)


def test_what_was_measured_comes_back_from_a_file():
    before = measured()
    after = Served.from_json(json.loads(json.dumps(before.to_json())))
    assert after[:3] == before[:3]
    assert after.profiled.to_json() == before.profiled.to_json()


def test_a_round_that_an_arm_lacks_is_noticed():
    values = measured().to_json()
    values["measured"]["off"].pop()
    with pytest.raises(ValueError, match="zip"):
        Served.from_json(values)
