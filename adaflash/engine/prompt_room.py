# SPDX-License-Identifier: Apache-2.0
"""How many prompt tokens a step takes beside sequences that must not wait too long for their next token. Host only."""

from __future__ import annotations

import math

import numpy as np

from adaflash.engine.sequence import Sequence, max_step_s
from adaflash.speculative.cost_model import StepCosts


class PromptRoom:
    """Room for prompts in one step: what is predicted to keep the smallest limit of the decoding sequences.

    Prompts come before drafts, which only get what is left. So that prompts never starve, a step takes `min_tokens` of
    them whatever the limits say.

    Args:
        costs: Seconds of steps; without them, as without limits, there is room for everything.
        decoding: What the step decodes.
        min_tokens: > 0.
    """

    def __init__(self, costs: StepCosts | None, decoding: list[Sequence], min_tokens: int) -> None:
        self._costs = costs
        self._max_step_s = math.inf if costs is None else max_step_s(decoding)
        self._min_tokens = min_tokens
        self._num_seqs = self._num_tokens = len(decoding)
        self._num_context = sum(seq.num_computed for seq in decoding)

    def fit(self, num_context: int, most: int) -> int:
        """Return how many tokens of one more prompt the step takes.

        Args:
            num_context: Tokens of the prompt that are computed.
            most: Tokens of it that could be taken, >= 0.
        """
        if self._costs is None or self._max_step_s == math.inf:
            return most
        rows = self._num_tokens + np.arange(1, most + 1)
        seconds = self._costs.verify_s(self._num_seqs + 1, rows, self._num_context + num_context)
        fitting = np.flatnonzero(seconds <= self._max_step_s)
        largest = int(fitting[-1]) + 1 if len(fitting) else 0
        return max(largest, min(self._min_tokens, most))

    def take(self, num_context: int, num_tokens: int) -> None:
        """Count a chunk of a prompt that the step computes."""
        self._num_seqs += 1
        self._num_tokens += num_tokens
        self._num_context += num_context
        self._min_tokens = max(0, self._min_tokens - num_tokens)
