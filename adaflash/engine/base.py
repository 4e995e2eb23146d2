# SPDX-License-Identifier: Apache-2.0
"""The engine as servers see it: asynchronous, one stream of deltas per request."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from adaflash.request import EngineInfo, EngineStats, Prompt, RequestOutput, SamplingParams


class EngineClient(Protocol):
    """What the gRPC and HTTP fronts need of an engine; implemented by `AsyncEngine`."""

    @property
    def info(self) -> EngineInfo:
        """What is being served."""

    def stats(self) -> EngineStats:
        """Return the current gauges and counters."""

    def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Start a request and iterate over its deltas; the last one has `finished` set and the final usage.

        Deltas a slow reader has not taken yet are merged into one, so a stream never holds more than its own output.
        Closing the iterator (or cancelling the task in it) aborts the request within one step.

        Raises:
            RequestError: The request is invalid; the engine was not touched.
            CapacityError: Too many requests wait; carries a retry hint.
            UnavailableError: The engine is draining or has failed.
        """

    async def abort(self, request_id: str) -> bool:
        """Stop a request; its stream ends with finish_reason `abort`. False when no such request runs."""

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; True when all finished, the rest are aborted."""

    async def close(self) -> None:
        """Stop the engine and release its memory; running requests end with UnavailableError."""
