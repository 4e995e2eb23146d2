# SPDX-License-Identifier: Apache-2.0
"""Arms of `policies` that keep what every engine step did and took, host time included."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple, cast

from policies import Arm, Traffic
from turns import Slice

from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.engine.profile_cases import ProfileLimits
from adaflash.engine.profiling import profile
from adaflash.engine.scheduler import Schedule
from adaflash.engine.speculation import Speculation
from adaflash.speculative.cost_model import CostModel


class ServedStep(NamedTuple):
    """One engine step.

    Attributes:
        num_seqs: Sequences, those whose prompt is computed included.
        num_tokens: Rows of the target forward: anchors, prompt tokens and verified drafts.
        num_prompt_tokens: Those of them that are prompt tokens.
        num_context: KV tokens of earlier steps, all sequences together.
        rest_s: Seconds of everything but drafting: the target forward, the host, the next requests.
        num_draft_rows: Rows of draft blocks, anchors included; 0 where nothing drafts.
        num_draft_context: As `num_context`, of the sequences that draft.
        draft_s: Seconds of drafting.
        caught_up: Whether `draft_s` includes context that had been put off.
        num_emitted: Output tokens, first ones included.
    """

    num_seqs: int
    num_tokens: int
    num_prompt_tokens: int
    num_context: int
    rest_s: float
    num_draft_rows: int
    num_draft_context: int
    draft_s: float
    caught_up: bool
    num_emitted: int


class StepWatch:
    """Stands in for an engine's `Speculation`: passes everything on, and keeps what the last step was.

    Args:
        engine: Which is watched from now on.

    Attributes:
        last: The last step; its `rest_s` is the engine's alone, and no token is counted.
    """

    def __init__(self, engine: Engine) -> None:
        self._speculation = engine._speculation
        self.last = ServedStep(0, 0, 0, 0, 0.0, 0, 0, 0.0, False, 0)
        engine._speculation = cast(Speculation, self)

    @property
    def costs(self) -> CostModel | None:
        """What the active policy takes steps to cost; None where it does not ask."""
        return None if self._speculation.goodput is None else self._speculation._costs

    def begin_step(self, plan: Schedule) -> None:
        """See `Speculation.begin_step`."""
        items = plan.scheduled
        self.last = self.last._replace(
            num_seqs=len(items),
            num_tokens=sum(item.num_tokens for item in items),
            num_prompt_tokens=sum(item.num_tokens for item in items if not item.seq.is_decoding),
            num_context=sum(item.seq.num_computed for item in items),
            num_draft_context=sum(item.seq.num_computed for item in items if item.max_drafts > 0),
        )
        self._speculation.begin_step(plan)

    def end_step(self, num_draft_rows: int, num_verified: int, draft_s: float, rest_s: float, caught_up: bool) -> None:
        """See `Speculation.end_step`."""
        self.last = self.last._replace(
            num_tokens=self.last.num_tokens + num_verified,
            rest_s=rest_s,
            num_draft_rows=num_draft_rows,
            draft_s=draft_s,
            caught_up=caught_up,
        )
        self._speculation.end_step(num_draft_rows, num_verified, draft_s, rest_s, caught_up)

    def __getattr__(self, name: str) -> object:
        return getattr(self._speculation, name)


class ArmSteps(NamedTuple):
    """What an arm did at one concurrency.

    Attributes:
        num_warmup_tokens: Output tokens before the first turn.
        turns: Steps of each turn.
        num_requests: Requests that were added, so numbered from 0.
        believed: The costs that its policy decides by, `CostModel.to_json` of them; None where it has none.
    """

    num_warmup_tokens: int
    turns: list[list[ServedStep]]
    num_requests: int
    believed: dict[str, object] | None = None


class ObservedArm(Arm):
    """An arm that keeps its steps.

    Args:
        name: See `arm_config`.
        config: What its engine loads.
    """

    def __init__(self, name: str, config: EngineConfig) -> None:
        super().__init__(name, config)
        self._watch = StepWatch(self._engine)
        self._config = config
        self._turns: list[list[ServedStep]] = []
        self._current: list[ServedStep] = []
        self._num_warmup_tokens = 0

    @property
    def steps(self) -> ArmSteps:
        """What it did since the last start."""
        costs = self._watch.costs
        believed = None if costs is None else costs.to_json()
        return ArmSteps(self._num_warmup_tokens, list(self._turns), self._next, believed)

    def start(self, traffic: Traffic, concurrency: int, warmup_s: float) -> None:
        """See `Arm.start`; turns are counted from here on."""
        self._turns = []
        super().start(traffic, concurrency, warmup_s)
        self._num_warmup_tokens = sum(step.num_emitted for turn in self._turns for step in turn)
        self._turns = []

    def run(self, traffic: Traffic, phase: int, seconds: float) -> Slice:
        """See `Arm.run`."""
        self._current = []
        counts = super().run(traffic, phase, seconds)
        self._turns.append(self._current)
        return counts

    def profile(self, max_num_seqs: int) -> CostModel:
        """Return what forwards of made-up sequences take now, between two turns."""
        limits = ProfileLimits(max_num_seqs, self._config.max_num_batched_tokens, self._config.max_model_len or 0)
        return profile(self._engine._runner, self._engine._blocks, limits)

    def _step(self, traffic: Traffic, phase: int) -> Slice:
        started = perf_counter()
        counts = super()._step(traffic, phase)
        rest_s = perf_counter() - started - self._watch.last.draft_s
        self._current.append(self._watch.last._replace(rest_s=rest_s, num_emitted=counts.num_tokens))
        return counts
