# SPDX-License-Identifier: Apache-2.0
"""Runs the same requests under several verify policies, interleaved, and compares them; shared by demo and bench."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from adaflash.request import ChatMessage, Prompt, RequestOutput, SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from adaflash.engine.engine import Engine

PassDone = Callable[["PassResult"], None]


class BenchRequest(NamedTuple):
    """One request of a benchmark."""

    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class RequestResult:
    """What one request produced and how long it took, from its submission.

    Attributes:
        ttft_s: Seconds to the first token.
        latency_s: Seconds to the last token.
    """

    token_ids: list[int]
    ttft_s: float
    latency_s: float
    num_cached_tokens: int
    speculation: SpeculationStats

    @property
    def token_interval_s(self) -> float:
        """Mean seconds between tokens after the first; 0 for a single token."""
        return (self.latency_s - self.ttft_s) / max(1, len(self.token_ids) - 1)


@dataclass(frozen=True)
class PassResult:
    """All requests once, under one policy and at one concurrency, prefill included."""

    policy: str
    concurrency: int
    seconds: float
    requests: list[RequestResult]

    @property
    def token_ids(self) -> list[list[int]]:
        """Generated tokens by request."""
        return [request.token_ids for request in self.requests]

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, all requests together."""
        return sum(len(token_ids) for token_ids in self.token_ids)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of wall-clock time."""
        return self.num_output_tokens / self.seconds


@dataclass(frozen=True)
class Spread:
    """Median and range of a figure over rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class PolicySummary:
    """One policy at one concurrency, over all rounds.

    Attributes:
        speedup: Against the reference policy in the same round; None when it was not measured.
        identical: Whether every round gave the reference's tokens; None when it was not measured.
        verified_per_round: Drafts verified in a target forward of one request.
    """

    policy: str
    concurrency: int
    num_rounds: int
    num_output_tokens: int
    tokens_per_s: Spread
    speedup: Spread | None
    identical: bool | None
    ttft_s: Spread
    token_interval_s: Spread
    acceptance_length: float
    verified_per_round: float
    num_verified_tokens: int
    num_accepted_tokens: int
    num_cached_tokens: int


class RunningRequest:
    """Collects a running request's deltas and the times at which they came.

    Args:
        submitted: `time.perf_counter()` when the request was submitted.
    """

    def __init__(self, submitted: float) -> None:
        self._submitted = submitted
        self._token_ids: list[int] = []
        self._first_token = 0.0
        self._last: RequestOutput | None = None

    def take(self, delta: RequestOutput) -> None:
        """Count one delta."""
        for output in delta.outputs:
            if output.token_ids and not self._token_ids:
                self._first_token = time.perf_counter()
            self._token_ids += output.token_ids
        self._last = delta

    def result(self) -> RequestResult:
        """Return the figures of the request, which has just finished."""
        assert self._last is not None, "a finished request had a delta"
        assert self._last.finished, "the last delta says that the request finished"
        now = time.perf_counter()
        ttft = (self._first_token or now) - self._submitted
        num_cached = self._last.usage.num_cached_tokens
        return RequestResult(self._token_ids, ttft, now - self._submitted, num_cached, self._last.speculation)


def chat_request(prompt: str, params: SamplingParams) -> BenchRequest:
    """Return a request with `prompt` as the user's message of a chat."""
    return BenchRequest([ChatMessage("user", prompt)], params)


def run_pass(engine: Engine, policy: str, requests: Sequence[BenchRequest], concurrency: int) -> PassResult:
    """Run every request once, `concurrency` of them at a time, and measure.

    Raises:
        ConfigError: The engine cannot run this policy.
        RequestError: A request is invalid.
    """
    engine.set_verify_policy(policy)
    waiting = deque(enumerate(requests))
    active: dict[str, tuple[int, RunningRequest]] = {}
    done: dict[int, RequestResult] = {}
    started = time.perf_counter()
    while waiting or active:
        while waiting and len(active) < concurrency:
            index, request = waiting.popleft()
            running = RunningRequest(time.perf_counter())
            active[engine.add_request(request.prompt, request.params)] = (index, running)
        for delta in engine.step():
            index, running = active[delta.request_id]
            running.take(delta)
            if delta.finished:
                done[index] = running.result()
                del active[delta.request_id]
    seconds = time.perf_counter() - started
    return PassResult(policy, concurrency, seconds, [done[index] for index in range(len(requests))])


def run_interleaved(
    engine: Engine,
    policies: Sequence[str],
    requests: Sequence[BenchRequest],
    concurrency: int,
    num_rounds: int,
    on_pass: PassDone | None = None,
) -> list[PassResult]:
    """Run every policy in every round, the order reversed in every second one, so that drift hits all alike.

    A short unmeasured pass of each policy comes first.
    """
    warmup = [request._replace(params=_shortened(request.params)) for request in requests[:concurrency]]
    for policy in policies:
        run_pass(engine, policy, warmup, concurrency)
    results = []
    for round_index in range(num_rounds):
        order = policies if round_index % 2 == 0 else list(reversed(policies))
        for policy in order:
            result = run_pass(engine, policy, requests, concurrency)
            results.append(result)
            if on_pass is not None:
                on_pass(result)
    return results


def summarize(results: Sequence[PassResult], reference: str) -> list[PolicySummary]:
    """Return one summary per policy, in order of appearance; all results are of one concurrency.

    Args:
        results: Passes, every policy once per round.
        reference: Policy whose tokens and speed the others are compared with, if it was measured.
    """
    by_policy: dict[str, list[PassResult]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    return [_summary(passes, by_policy.get(reference)) for passes in by_policy.values()]


def spread(values: Sequence[float]) -> Spread:
    """Return median, minimum and maximum."""
    return Spread(statistics.median(values), min(values), max(values))


def _summary(passes: list[PassResult], reference: list[PassResult] | None) -> PolicySummary:
    requests = [request for result in passes for request in result.requests]
    stats = [request.speculation for request in requests]
    rounds = sum(stat.num_rounds for stat in stats)
    verified = sum(stat.num_verified_tokens for stat in stats)
    speedup = identical = None
    if reference is not None:
        ratios = [mine.tokens_per_s / other.tokens_per_s for mine, other in zip(passes, reference, strict=True)]
        speedup = spread(ratios)
        identical = all(result.token_ids == reference[0].token_ids for result in passes)
    return PolicySummary(
        policy=passes[0].policy,
        concurrency=passes[0].concurrency,
        num_rounds=len(passes),
        num_output_tokens=passes[0].num_output_tokens,
        tokens_per_s=spread([result.tokens_per_s for result in passes]),
        speedup=speedup,
        identical=identical,
        ttft_s=spread([request.ttft_s for request in requests]),
        token_interval_s=spread([request.token_interval_s for request in requests]),
        acceptance_length=sum(stat.num_emitted_tokens for stat in stats) / max(1, rounds),
        verified_per_round=verified / max(1, rounds),
        num_verified_tokens=verified,
        num_accepted_tokens=sum(stat.num_accepted_tokens for stat in stats),
        num_cached_tokens=sum(request.num_cached_tokens for request in requests),
    )


def _shortened(params: SamplingParams) -> SamplingParams:
    return SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=min(8, params.max_tokens or 8))
