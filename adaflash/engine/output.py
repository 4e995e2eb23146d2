# SPDX-License-Identifier: Apache-2.0
"""The committed-token stream of one sample: the only source of its text, ids, logprobs, usage and finish."""

from __future__ import annotations

import copy

from adaflash.engine.detokenizer import Detokenizer
from adaflash.request import (
    CompletionOutput,
    FinishReason,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)


class SampleOutput:
    """Takes committed tokens, finds where the output ends, and hands out what is new.

    Args:
        index: Which of the request's n samples.
        params: Stop conditions and what to return.
        eos_token_ids: The model's own stop ids.
        max_output_tokens: `max_tokens`, cut to what the context limit leaves.
        detokenizer: Turns tokens into text; None when the model has no tokenizer.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        max_output_tokens: int,
        detokenizer: Detokenizer | None,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finished = False
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._max_output_tokens = max_output_tokens
        self._detokenizer = detokenizer
        self._new_token_ids: list[int] = []
        self._new_logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []

    def extend(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> list[int]:
        """Commit tokens until one ends the output; returns those committed, nothing after them may follow.

        Args:
            token_ids: What a round decided, at least one token.
            logprobs: One per token; needed when the request asked for them.
        """
        assert not self.finished, "nothing is committed after the end"
        for num_committed, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            is_stop_id = token_id in self._eos_token_ids or token_id in self._stop_token_ids
            if is_stop_id and self.num_tokens > self._params.min_tokens:
                self._stop_at_id(token_id)
            elif self._detokenizer is not None:
                self._push_text(self._detokenizer, token_id)
            if not self.finished and self.num_tokens >= self._max_output_tokens:
                self.finish("length")
            if self.finished:
                token_ids = token_ids[:num_committed]
                break
        self._new_token_ids += token_ids
        if self._new_logprobs is not None:
            assert logprobs is not None, "logprobs were asked for"
            self._new_logprobs += logprobs[: len(token_ids)]
        return token_ids

    def finish(self, reason: FinishReason) -> None:
        """End the output."""
        self.finished = True
        self.finish_reason = reason

    def take_delta(self) -> CompletionOutput:
        """Return what was committed since the last call; text that may still become a stop string is held back."""
        delta = CompletionOutput(
            self.index,
            self._take_text(),
            self._new_token_ids,
            self._new_logprobs,
            self.finish_reason,
            self.stop_reason,
        )
        self._new_token_ids = []
        self._new_logprobs = None if self._new_logprobs is None else []
        return delta

    def _stop_at_id(self, token_id: int) -> None:
        if self._params.include_stop_str_in_output and self._detokenizer is not None:
            self._push_text(self._detokenizer, token_id)
        self.finish("stop")
        self.stop_reason = token_id if token_id in self._stop_token_ids else None

    def _push_text(self, detokenizer: Detokenizer, token_id: int) -> None:
        match = detokenizer.push(token_id)
        if match is not None:
            self.finish("stop")
            self.stop_reason = match.stop

    def _take_text(self) -> str:
        if self._detokenizer is None:
            return ""
        if self.finished:
            self._detokenizer.finish()
        return self._detokenizer.take_text()


def snapshot(stats: SpeculationStats) -> SpeculationStats:
    """Return a copy that later steps do not change."""
    return copy.copy(stats)
