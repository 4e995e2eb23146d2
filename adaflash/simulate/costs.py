# SPDX-License-Identifier: Apache-2.0
"""What a simulated step costs, from a roofline or from a profile that was measured on the device."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from adaflash.errors import ConfigError
from adaflash.simulate.roofline import NO_PREFILL, FloatArray, IntArray, PrefillWork
from adaflash.speculative.cost_model import CostModel, StepCosts
from adaflash.speculative.cost_table import CostSample


class SimulatedCosts(StepCosts, Protocol):
    """`StepCosts` that know more of a step than a policy does; `RooflineCosts` documents them."""

    def draft_s(self, num_seqs: IntArray, num_context: IntArray | int, num_drafts: IntArray | int) -> FloatArray:
        """Return the seconds of a draft step by drafting sequences and drafts of each."""

    def step_s(self, num_seqs: int, num_tokens: IntArray, num_context: int, prefill: PrefillWork) -> FloatArray:
        """Return the seconds of a target step that has prompt chunks besides, [N] -> [N]."""

    def context_s(self, num_rows: IntArray) -> FloatArray:
        """Return the seconds of writing so many rows of the drafter's context, [N] -> [N]."""


class MeasuredCosts:
    """Costs interpolated from a measured profile; writing the drafter's context is part of what was measured.

    Args:
        model: Fitted to the profile.
    """

    def __init__(self, model: CostModel) -> None:
        self._model = model

    def verify_s(self, num_seqs: int, num_tokens: IntArray, num_context: int) -> FloatArray:
        """See `StepCosts.verify_s`."""
        return self._model.verify_s(num_seqs, num_tokens, num_context)

    def draft_s(self, num_seqs: IntArray, num_context: IntArray | int, num_drafts: IntArray | int) -> FloatArray:
        """See `RooflineCosts.draft_s`."""
        if isinstance(num_context, int):
            return self._model.draft_s(num_seqs, num_context, num_drafts)
        each = np.broadcast(num_seqs, num_context, num_drafts)
        seconds = [
            self._model.draft_s(np.array([seqs]), int(context), int(drafts))[0] for seqs, context, drafts in each
        ]
        return np.array(seconds).reshape(each.shape)

    def step_s(self, num_seqs: int, num_tokens: IntArray, num_context: int, prefill: PrefillWork) -> FloatArray:
        """See `RooflineCosts.step_s`; a prompt's rows cost what a decoding sequence's do."""
        rows = np.asarray(num_tokens) + prefill.num_tokens
        return self._model.verify_s(num_seqs + prefill.num_seqs, rows, num_context + prefill.num_context)

    def context_s(self, num_rows: IntArray) -> FloatArray:
        """Return zeros."""
        return np.zeros(len(num_rows))


class StepDemand(NamedTuple):
    """A step before it is known who drafts.

    Attributes:
        costs: Of the device.
        num_decoding: S, sequences with an anchor.
        num_context: KV tokens of those sequences.
        prefill: Prompt chunks of the same step.
        writes_context: Whether a drafter is loaded, which needs the context of what it is to draft after.
    """

    costs: SimulatedCosts
    num_decoding: int
    num_context: int
    prefill: PrefillWork
    writes_context: bool

    def step_s(self, num_drafting: IntArray, num_verified: IntArray, num_drafts: int) -> FloatArray:
        """Return the seconds of the step for N choices; drafting sequences have contexts of mean length.

        Args:
            num_drafting: [N] sequences that draft.
            num_verified: [N] drafts verified, of all sequences together.
            num_drafts: Drafts made for each sequence that drafts.

        Returns:
            [N].
        """
        read = num_drafting * self.num_context // max(self.num_decoding, 1)
        rows = self.num_decoding + num_verified
        seconds = self.costs.draft_s(num_drafting, read, num_drafts)
        seconds = seconds + self.costs.step_s(self.num_decoding, rows, self.num_context, self.prefill)
        if self.writes_context:
            seconds = seconds + self.costs.context_s(num_drafting + num_verified + self.prefill.num_tokens)
        return seconds

    def decoding_s(self, num_drafting: IntArray, num_verified: IntArray, num_drafts: int) -> FloatArray:
        """Return the same without what the prompt chunks cost in a step of plain decoding.

        The time that prompts take is the same in the end however their steps are used, so what decoding maximises is
        its tokens over the other time; with the whole step's, drafts beside a long prompt would look cheap.
        """
        nobody, plain = np.array([0]), self._replace(prefill=NO_PREFILL)
        plain_s = plain.step_s(nobody, nobody, 0)
        return self.step_s(num_drafting, num_verified, num_drafts) - self.step_s(nobody, nobody, 0) + plain_s


def read_profile(path: Path, max_num_tokens: int, max_draft_rows: int) -> MeasuredCosts:
    """Read a measured profile: JSON of verify and draft samples.

    `{"verify": [[num_seqs, num_tokens, num_context, seconds], ...], "draft": [[num_rows, num_context, seconds], ...]}`
    with the KV tokens of all sequences together as `num_context`, and the rows of all draft blocks, anchors included.
    Where rows cost in steps of several (`Backend.row_multiple`) a third key `row_multiple` says of how many.

    Args:
        path: The file.
        max_num_tokens: Most rows of a step that is simulated.
        max_draft_rows: Most rows of a draft forward.

    Raises:
        ConfigError: The file cannot be read, or is not such a profile.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile={str(path)!r} cannot be read: {error}") from error
    if not isinstance(values, Mapping) or set(values) | {"row_multiple"} != {"verify", "draft", "row_multiple"}:
        raise ConfigError(f"profile={str(path)!r} is invalid: must be an object with verify and draft")
    row_multiple = values.get("row_multiple", 1)
    if type(row_multiple) is not int or row_multiple < 1:
        raise ConfigError(f"profile={str(path)!r} is invalid: row_multiple={row_multiple!r} must be an integer >= 1")
    verify = [
        CostSample(int(tokens), int(seqs), int(context), seconds)
        for seqs, tokens, context, seconds in _rows(path, values, "verify", 4)
    ]
    draft = [
        CostSample(int(rows), 0, int(context), seconds) for rows, context, seconds in _rows(path, values, "draft", 3)
    ]
    return MeasuredCosts(CostModel.from_samples(verify, draft, max_num_tokens, max_draft_rows, row_multiple))


def _rows(path: Path, values: Mapping[str, object], key: str, width: int) -> list[list[float]]:
    """Return the samples under a key: finite numbers, the last one > 0, the first one >= 1."""
    rows = values[key]
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"profile={str(path)!r} is invalid: {key} must be a list of samples, at least one")
    for index, row in enumerate(rows):
        is_row = isinstance(row, list) and len(row) == width and all(_is_number(cell) for cell in row)
        if not is_row or row[0] < 1 or row[-1] <= 0:
            raise ConfigError(
                f"profile={str(path)!r} is invalid: {key}[{index}]={row!r} must be {width} numbers >= 0, "
                "sequences >= 1 and seconds > 0"
            )
    return rows


def _is_number(cell: object) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool) and math.isfinite(cell) and cell >= 0
