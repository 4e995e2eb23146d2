# SPDX-License-Identifier: Apache-2.0
"""What was measured at one concurrency, as a JSON file keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from served_steps import ArmSteps, ServedStep
from turns import Round, Slice

from adaflash.speculative.cost_model import CostModel


class Served(NamedTuple):
    """What was measured at one concurrency.

    Attributes:
        rounds: Turns of all arms, of one phase.
        steps: Of every arm.
        profiled: Forwards alone, measured after the turns.
    """

    concurrency: int
    rounds: list[Round]
    steps: dict[str, ArmSteps]
    profiled: CostModel

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {
            "concurrency": self.concurrency,
            "measured": {arm: [turn.slices[arm]._asdict() for turn in self.rounds] for arm in self.steps},
            "steps": {arm: steps._asdict() for arm, steps in self.steps.items()},
            "profile": self.profiled.to_json(),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Served:
        """Return what `to_json` described.

        Raises:
            KeyError: Something is missing.
            TypeError: Something is missing from a step or slice.
            ValueError: The profile is none.
        """
        slices = {arm: [Slice(**part) for part in parts] for arm, parts in values["measured"].items()}
        rounds = [Round(0, dict(zip(slices, parts, strict=True))) for parts in zip(*slices.values(), strict=True)]
        steps = {arm: _arm_steps(one) for arm, one in values["steps"].items()}
        return Served(values["concurrency"], rounds, steps, CostModel.from_json(values["profile"]))


def _arm_steps(values: Mapping[str, Any]) -> ArmSteps:
    turns = [[ServedStep(*step) for step in turn] for turn in values["turns"]]
    return ArmSteps(values["num_warmup_tokens"], turns, values["num_requests"], values["believed"])
