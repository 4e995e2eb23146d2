# SPDX-License-Identifier: Apache-2.0
"""The simulator as `policies` measures: the same first requests, a warm-up, and turns of as many tokens as served."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate

from policies import OUTPUT_TOKENS
from served_steps import ArmSteps
from step_costs import priced
from turns import Slice

from adaflash.simulate.acceptance import RepeatedAnswers
from adaflash.simulate.costs import MeasuredCosts
from adaflash.simulate.policies import Policy, make_policy
from adaflash.simulate.roofline import FloatArray, IntArray
from adaflash.simulate.simulation import Load, Simulation
from adaflash.simulate.tally import Tally
from adaflash.speculative.cost_model import CostModel, StepCosts


class CurrentCosts:
    """Costs that a policy keeps while they change from one concurrency to the next.

    Args:
        costs: What counts now; replaced by whoever simulates.

    Attributes:
        load: A factor, as engines learn it for the load of their machine.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.load = 1.0

    def verify_s(self, num_seqs: int, num_tokens: IntArray, num_context: int) -> FloatArray:
        """See `StepCosts.verify_s`."""
        return self.costs.verify_s(num_seqs, num_tokens, num_context) * self.load

    def draft_s(self, num_seqs: IntArray, num_context: int, num_drafts: IntArray | int) -> FloatArray:
        """See `StepCosts.draft_s`."""
        return self.costs.draft_s(num_seqs, num_context, num_drafts) * self.load


class SliceTally(Tally):
    """A tally that adds up what turns are made of.

    Attributes:
        counts: So far.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.name)
        self.counts = Slice()

    def add_step(self, elapsed_s: float, num_decoding: int, num_drafting: int) -> None:
        """See `Tally.add_step`."""
        decode_steps = int(num_decoding > 0)
        self._add(Slice(elapsed_s, num_decode_steps=decode_steps, num_draft_steps=int(num_drafting > 0)))

    def add_round(self, num_verified: int, num_emitted: int, gap_s: float) -> None:
        """See `Tally.add_round`; gaps are not kept."""
        self._add(Slice(0.0, num_emitted, 1, num_emitted, num_verified))

    def add_first_token(self) -> None:
        """See `Tally.add_first_token`."""
        self._add(Slice(num_tokens=1))

    def _add(self, part: Slice) -> None:
        self.counts = Slice.total((self.counts, part))


class ServedSimulation(Simulation):
    """A simulation that starts as `Arm.start` does, of users who never run out of requests."""

    def turns(self, served: ArmSteps) -> list[Slice]:
        """Simulate until as many tokens are out as were served; returns a slice per turn.

        A turn ends with the step in which the simulation has as many tokens as had been served when the turn of the
        server ended. Nothing of the simulation is left in the policy but what it learned.
        """
        tally = SliceTally(self.policy)
        self._open()
        self._run_to(served.num_warmup_tokens, tally)
        slices, num_turn_tokens = [], [sum(step.num_emitted for step in turn) for turn in served.turns]
        before = tally.counts
        for num_tokens in accumulate(num_turn_tokens, initial=served.num_warmup_tokens):
            self._run_to(num_tokens, tally)
            slices.append(Slice(*map(operator.sub, tally.counts, before)))
            before = tally.counts
        for request in self._running:
            self.policy.forget(request.key)
        return slices[1:]

    def _run_to(self, num_tokens: int, tally: SliceTally) -> None:
        while tally.counts.num_tokens < num_tokens:
            self._step(tally)

    def _open(self) -> None:
        concurrency = self.load.concurrency
        assert concurrency is not None, "arms serve users"
        for index in range(concurrency):
            self._create(-(-OUTPUT_TOKENS * (index + 1) // concurrency) / OUTPUT_TOKENS)


class SimulatedArms:
    """Arms through all concurrencies; a policy keeps what it learned from one to the next.

    Args:
        arms: As `policies` spells them.
        answers: To the requests, in the order in which they are handed out.
        num_drafts: K.
        max_num_batched_tokens: Most rows of a step.
        believing: Whether a policy with costs of its own decides by those that the served one ended with, times what
            makes them fit the simulation's on the whole. Otherwise it knows those of the simulation.
    """

    def __init__(
        self,
        arms: Sequence[str],
        answers: RepeatedAnswers,
        num_drafts: int,
        max_num_batched_tokens: int,
        believing: bool = False,
    ) -> None:
        self._arms, self._answers, self._num_drafts = arms, answers, num_drafts
        self._max_num_batched_tokens = max_num_batched_tokens
        self._believing = believing
        self._policies: dict[str, tuple[Policy, CurrentCosts]] = {}

    def turns(
        self, concurrency: int, served: Mapping[str, ArmSteps], models: Mapping[str, CostModel]
    ) -> dict[str, list[Slice]]:
        """Return the turns of every arm.

        Args:
            concurrency: Users.
            served: What is simulated, by arm.
            models: What steps cost, by arm.
        """
        load = Load(
            sys.maxsize,
            concurrency,
            max_num_seqs=concurrency,
            max_num_batched_tokens=self._max_num_batched_tokens,
        )
        turns = {}
        for arm in self._arms:
            policy = self._policy(arm, served[arm], models[arm])
            costs = MeasuredCosts(models[arm])
            turns[arm] = ServedSimulation(load, self._answers, costs, policy, self._num_drafts).turns(served[arm])
        return turns

    def _policy(self, arm: str, served: ArmSteps, model: CostModel) -> Policy:
        """Return an arm's policy, deciding by the costs of the moment."""
        if arm not in self._policies:
            current = CurrentCosts(model)
            policy = make_policy(arm, self._num_drafts + 1, self._answers.has_length_ratio, current)
            self._policies[arm] = policy, current
        policy, current = self._policies[arm]
        current.costs, current.load = model, 1.0
        if self._believing and served.believed is not None:
            steps = [step for turn in served.turns for step in turn]
            believed = CostModel.from_json(served.believed)
            current.costs, current.load = believed, priced(steps, model).total / priced(steps, believed).total
        return policy
