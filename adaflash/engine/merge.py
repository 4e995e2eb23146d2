# SPDX-License-Identifier: Apache-2.0
"""Joins deltas of one request into one, for whole replies and for readers that fall behind."""

from __future__ import annotations

from adaflash.request import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs


class _SampleParts:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def add(self, delta: CompletionOutput) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class OutputMerger:
    """Takes deltas in order and gives back what they add up to."""

    def __init__(self) -> None:
        self._samples: dict[int, _SampleParts] = {}
        self._last: RequestOutput | None = None
        self._num_deltas = 0

    @property
    def is_empty(self) -> bool:
        """Whether no delta was added yet."""
        return self._last is None

    def add(self, output: RequestOutput) -> None:
        """Take the next delta."""
        self._last = output
        self._num_deltas += 1
        for delta in output.outputs:
            self._samples.setdefault(delta.index, _SampleParts()).add(delta)

    def result(self) -> RequestOutput:
        """Return their sum, samples by index; usage and speculation are the last delta's."""
        assert self._last is not None, "there is nothing to add up"
        if self._num_deltas == 1:
            return self._last
        outputs = [
            CompletionOutput(
                index, "".join(parts.texts), parts.token_ids, parts.logprobs, parts.finish_reason, parts.stop_reason
            )
            for index, parts in sorted(self._samples.items())
        ]
        return self._last._replace(outputs=outputs)
