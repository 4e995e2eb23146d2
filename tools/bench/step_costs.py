# SPDX-License-Identifier: Apache-2.0
"""A cost model of served steps: medians by size, and a profile for the sizes that serving did not reach."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from served_steps import ServedStep

from adaflash.speculative.cost_model import CostModel
from adaflash.speculative.cost_table import CostSample, knots_up_to

# Steps of a kind whose median counts.
MIN_STEPS = 3
# Sizes up to here are kept apart, larger ones with those of the same knot; contexts in quarters of an octave.
_MAX_EXACT_SIZE, _CONTEXTS_PER_OCTAVE = 16, 4


class StepSamples(NamedTuple):
    """Samples of the rest of steps, over rows of the target, and of draft forwards, over rows of blocks."""

    verify: list[CostSample]
    draft: list[CostSample]


class StepSeconds(NamedTuple):
    """Seconds of some steps."""

    rest_s: float
    draft_s: float

    @property
    def total(self) -> float:
        """Of both parts."""
        return self.rest_s + self.draft_s


class StepLimits(NamedTuple):
    """Sizes that a cost model is for.

    Attributes:
        num_seqs: Sequences that run at a time.
        draft_block_size: W.
        max_num_tokens: Most rows of a target forward.
        num_context: Typical KV tokens of all sequences together.
        row_multiple: `Backend.row_multiple`.
    """

    num_seqs: int
    draft_block_size: int
    max_num_tokens: int
    num_context: int
    row_multiple: int = 1

    @property
    def max_rows(self) -> int:
        """Most rows that decode or draft."""
        return self.num_seqs * self.draft_block_size


def step_samples(steps: Iterable[ServedStep]) -> StepSamples:
    """Return what steps say about costs; a draft that also caught up with its context says nothing."""
    samples = StepSamples([], [])
    for step in steps:
        samples.verify.append(CostSample(step.num_tokens, step.num_seqs, step.num_context, step.rest_s))
        if step.num_draft_rows and not step.caught_up:
            samples.draft.append(CostSample(step.num_draft_rows, 0, step.num_draft_context, step.draft_s))
    return samples


def size_class(size: int) -> int:
    """Return what stands for a size: itself, or the nearest knot for large ones."""
    if size <= _MAX_EXACT_SIZE:
        return size
    return min(knots_up_to(4 << size.bit_length()), key=lambda knot: abs(math.log(knot / size)))


def median_samples(samples: Sequence[CostSample]) -> list[CostSample]:
    """Return the medians of samples of alike size, sequences and context.

    Of a kind that is rarer than `MIN_STEPS` contexts are joined; what is rare even then counts only where nothing else
    is known of the size, since a single stall would decide it.
    """
    kept, rare = [], []
    for group in _grouped(samples, lambda s: (size_class(s.size), s.num_seqs, _context_class(s.num_context))):
        if len(group) >= MIN_STEPS:
            kept.append(_median(group))
        else:
            rare += group
    known = {size_class(sample.size) for sample in kept}
    for group in _grouped(rare, lambda s: (size_class(s.size), s.num_seqs)):
        if len(group) >= MIN_STEPS or size_class(group[0].size) not in known:
            kept.append(_median(group))
    return kept


def fit(samples: StepSamples, profiled: CostModel, limits: StepLimits) -> tuple[CostModel, StepSamples]:
    """Return a cost model of served steps, and the samples that it was fitted to.

    Args:
        samples: Of served steps, at least one of the target.
        profiled: Forwards alone; sizes that were not served take its seconds, times what served steps of other sizes
            took over theirs.
        limits: What it is for.
    """
    verify, draft = median_samples(samples.verify), median_samples(samples.draft)
    knots, context = knots_up_to(limits.max_rows, limits.row_multiple), limits.num_context
    made_up = [CostSample(knot, min(knot, limits.num_seqs), context, 0.0) for knot in knots]
    verify += _unserved(made_up, verify, lambda s: _verify_s(profiled, s))
    blocks = [CostSample(knot, 0, context * knot // limits.max_rows, 0.0) for knot in knots if knot > 1]
    draft += _unserved(blocks, draft, lambda s: _draft_s(profiled, s))
    model = CostModel.from_samples(verify, draft, limits.max_num_tokens, limits.max_rows, limits.row_multiple)
    return model, StepSamples(verify, draft)


def priced(steps: Iterable[ServedStep], model: CostModel) -> StepSeconds:
    """Return what a model says that steps took."""
    rest_s = draft_s = 0.0
    for step in steps:
        rest_s += _verify_s(model, CostSample(step.num_tokens, step.num_seqs, step.num_context, 0.0))
        if step.num_draft_rows:
            draft_s += _draft_s(model, CostSample(step.num_draft_rows, 0, step.num_draft_context, 0.0))
    return StepSeconds(rest_s, draft_s)


def taken(steps: Iterable[ServedStep]) -> StepSeconds:
    """Return what steps did take."""
    listed = list(steps)
    return StepSeconds(sum(step.rest_s for step in listed), sum(step.draft_s for step in listed))


def _unserved(
    wanted: Iterable[CostSample], served: Sequence[CostSample], seconds: Callable[[CostSample], float]
) -> list[CostSample]:
    """Return profiled samples of the sizes that were not served, as much dearer as served ones were."""
    known = {size_class(sample.size) for sample in served}
    factor = statistics.median(s.seconds / seconds(s) for s in served) if served else 1.0
    missing = [sample for sample in wanted if size_class(sample.size) not in known]
    return [sample._replace(seconds=factor * seconds(sample)) for sample in missing]


def _verify_s(model: CostModel, sample: CostSample) -> float:
    return float(model.verify_s(sample.num_seqs, np.array([sample.size]), sample.num_context)[0])


def _draft_s(model: CostModel, sample: CostSample) -> float:
    """Return the seconds of a draft forward by its rows: as of so many sequences with a single row."""
    return float(model.draft_s(np.array([sample.size]), sample.num_context, 0)[0])


def _grouped(samples: Iterable[CostSample], key: Callable[[CostSample], Hashable]) -> list[list[CostSample]]:
    groups: dict[Hashable, list[CostSample]] = defaultdict(list)
    for sample in samples:
        groups[key(sample)].append(sample)
    return list(groups.values())


def _context_class(num_context: int) -> int:
    return round(_CONTEXTS_PER_OCTAVE * math.log2(num_context + 1))


def _median(group: Sequence[CostSample]) -> CostSample:
    size, num_seqs, num_context, seconds = (statistics.median(values) for values in zip(*group, strict=True))
    return CostSample(round(size), round(num_seqs), round(num_context), float(seconds))
