# SPDX-License-Identifier: Apache-2.0
"""How a running engine speculates: the active verify policy, asked before and after drafting, told what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from adaflash.config import EngineConfig
from adaflash.engine.cost_cache import CostCache, load_or_profile
from adaflash.engine.loading import resolve_policy
from adaflash.engine.profile_cases import ProfileLimits
from adaflash.engine.runner import Runner
from adaflash.engine.scheduler import DraftLimits, Schedule, ScheduledSequence, Scheduler
from adaflash.engine.sequence import ContextWrite, Sequence, max_step_s
from adaflash.speculative.budget import DraftSignals, VerifyPolicy
from adaflash.speculative.cost_model import CostModel
from adaflash.speculative.goodput import GoodputPolicy
from adaflash.speculative.step_load import Candidate, StepLoad
from adaflash.speculative.survival import temperature_class

logger = logging.getLogger(__name__)

_PLAIN_SAMPLING = 4  # of plain steps in a row, every so-manieth is learned from: they are much alike


class Speculation:
    """The verify policy and what it needs to know about steps.

    Args:
        config: Names the policy and its settings.
        runner: The models; without drafters every policy but `off` is refused.
        scheduler: Is told what may be drafted.
        max_model_len: Longest sequence.

    Attributes:
        is_on_trial: Says which sequences' drafts decide between two drafter versions.

    Raises:
        ConfigError: The policy needs a drafter or a length head that is not there.
    """

    def __init__(self, config: EngineConfig, runner: Runner, scheduler: Scheduler, max_model_len: int) -> None:
        self._config = config
        self._runner, self._scheduler = runner, scheduler
        self._drafter = runner.drafter
        self._limits = ProfileLimits(config.max_num_seqs, config.max_num_batched_tokens, max_model_len)
        self.is_on_trial: Callable[[Sequence], bool] = _never
        self._costs: CostModel | None = None
        self._cost_cache: CostCache | None = None
        self._rule = VerifyPolicy("off", 1)
        self._goodput: GoodputPolicy | None = None
        self._load = StepLoad(0, 0, 0, 0)
        self._num_plain = 0
        self.switch(config.verify_policy)

    # ---- which policy ----------------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """Name of the active policy."""
        return self._rule.name

    def switch(self, name: str) -> None:
        """Make another policy the active one, between two steps; the first time, `goodput` measures what steps cost.

        Raises:
            ConfigError: The policy needs a drafter or a length head that is not there.
        """
        config, resolved = self._config, resolve_policy(name, self._drafter)
        if resolved == "goodput" and self._goodput is None:
            self._costs, self._cost_cache = load_or_profile(self._runner, self._scheduler.blocks, self._limits)
            self._goodput = GoodputPolicy(self._costs, self.draft_width)
            self._runner.make_backlog(self._config.max_num_seqs)
        self._rule = VerifyPolicy(
            resolved,
            self.draft_width + 1,
            config.confidence_threshold,
            config.length_head_rate,
            config.length_head_min,
        )
        self._scheduler.limits = self.limits
        self._scheduler.select = None if self.goodput is None else self.select
        self._scheduler.costs = None if self.goodput is None else self._costs
        if self.limits is None:
            for seq in self._scheduler.running:
                self._runner.drop_pending(seq)
                self._scheduler.give_up_pending(seq)

    @property
    def draft_width(self) -> int:
        """K, drafts per block; 0 without a drafter."""
        return 0 if self._drafter is None else self._drafter.draft_block_size - 1

    @property
    def limits(self) -> DraftLimits | None:
        """What a sequence may draft at all; None when nothing is drafted."""
        if self._drafter is None or self.policy == "off":
            return None
        max_drafts = min(self.draft_width, self._config.num_speculative_tokens or self.draft_width)
        return DraftLimits(self._drafter.draft_block_size, max_drafts, self._drafter.max_position_embeddings)

    @property
    def goodput(self) -> GoodputPolicy | None:
        """The policy `goodput` while it is the active one."""
        return self._goodput if self.policy == "goodput" else None

    # ---- in a step -------------------------------------------------------------------------------------------

    @property
    def takes_bare_prefixes(self) -> bool:
        """Whether cached tokens without drafter rows are as good as any, since drafting does not pay now."""
        return self.goodput is not None and not self.goodput.is_drafting

    def select(self, decoding: list[Sequence], max_drafts: list[int], num_prefill: int) -> list[int]:
        """See `DraftSelector`; only for `goodput`."""
        policy = self.goodput
        assert policy is not None, "other policies let everybody draft"
        candidates = [self._candidate(seq, most) for seq, most in zip(decoding, max_drafts, strict=True)]
        load = StepLoad(
            len(decoding) + (num_prefill > 0),
            len(decoding),
            len(decoding) + num_prefill,
            sum(seq.num_computed for seq in decoding),
            max_step_s(decoding),
        )
        return policy.select(candidates, load)

    def begin_step(self, plan: Schedule) -> None:
        """Take notice of what runs in the step that begins."""
        if self.goodput is not None:
            self._load = _load(plan)

    def num_drafts(self, drafting: list[ScheduledSequence]) -> int:
        """Return how many tokens to draft for each: what `goodput` selected, else as many as a round ever verifies.

        The length head is asked about whole blocks, as it was trained.
        """
        if self.goodput is not None:
            return max(item.max_drafts for item in drafting)
        assert self.limits is not None, "something drafts"
        return self.draft_width if self.policy == "length_head" else self.limits.max_drafts

    def choose(self, signals: DraftSignals, drafting: list[ScheduledSequence]) -> list[int]:
        """Return how many drafts each sequence of `drafting` verifies."""
        policy = self.goodput
        if policy is None:
            return self._rule.choose(signals, [item.max_drafts for item in drafting])
        return policy.choose(signals, [self._candidate(item.seq, item.max_drafts) for item in drafting], self._load)

    def expected_tokens(self, draft_row: int) -> float:
        """Return how many drafts of a row of the last `choose` are expected to be accepted; 0 without expectation."""
        return 0.0 if self.goodput is None else self.goodput.expected_tokens[draft_row]

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of survival, lately; 0 before `goodput` saw a draft."""
        return 0.0 if self._goodput is None else self._goodput.calibration_error

    def context(self, item: ScheduledSequence) -> ContextWrite:
        """Return when the drafter's context of a sequence's rows is to be written."""
        seq = item.seq
        if self.limits is None or not seq.has_drafter_kv:
            return ContextWrite.NEVER
        is_plain = self.goodput is not None and item.max_drafts == 0 and seq.is_decoding
        return ContextWrite.LATER if is_plain or seq.num_pending else ContextWrite.NOW

    def observe(self, num_accepted: list[int]) -> None:
        """Learn how many drafts the target accepted, in the order of `choose`."""
        if self.goodput is not None and num_accepted:
            self.goodput.observe(num_accepted)

    def end_step(self, num_draft_rows: int, num_verified: int, draft_s: float, rest_s: float, caught_up: bool) -> None:
        """Learn what the step cost.

        Args:
            num_draft_rows: Rows of draft blocks, anchors included.
            num_verified: Drafts verified.
            draft_s: Seconds spent drafting.
            rest_s: All other seconds of the step.
            caught_up: Whether `draft_s` includes context that had been put off.
        """
        policy, costs = self.goodput, self._costs
        if policy is None:
            return
        assert costs is not None, "goodput has its costs"
        load = self._load
        if num_draft_rows and not caught_up:
            costs.observe_draft(num_draft_rows, load.num_context, draft_s)
        self._num_plain = 0 if num_draft_rows else self._num_plain + 1
        if self._num_plain % _PLAIN_SAMPLING == 0:
            costs.observe_verify(load.num_seqs, load.num_tokens + num_verified, load.num_context, rest_s)
        policy.end_step(draft_s + rest_s, load)

    def _candidate(self, seq: Sequence, max_drafts: int) -> Candidate:
        kind = temperature_class(seq.request.params.temperature)
        return Candidate(seq.key, kind, seq.drafter_version, max_drafts, self.is_on_trial(seq))

    def forget(self, seq: Sequence) -> None:
        """Drop what is known of a sequence that has ended."""
        if self._goodput is not None:
            self._goodput.forget(seq.key)

    def close(self) -> None:
        """Keep for the next start what was learned about costs."""
        if self._costs is not None and self._cost_cache is not None:
            self._cost_cache.save(self._costs)


def _never(_: Sequence) -> bool:
    return False


def _load(plan: Schedule) -> StepLoad:
    items = plan.scheduled
    sampling = [item.seq for item in items if item.samples]
    return StepLoad(
        len(items),
        len(sampling),
        sum(item.num_tokens for item in items),
        sum(item.seq.num_computed for item in items),
        max_step_s(seq for seq in sampling if seq.is_decoding),
    )
