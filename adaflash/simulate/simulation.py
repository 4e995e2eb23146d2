# SPDX-License-Identifier: Apache-2.0
"""The simulated server: requests arrive, prompts are computed in chunks beside decoding, every step takes its time.

Steps are planned as `engine/scheduler.py` plans them, with memory for every request: anchors first, then drafts, then
running prompts, then new ones, within `max_num_batched_tokens` rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from adaflash.errors import ConfigError
from adaflash.simulate.acceptance import Answer, Answers
from adaflash.simulate.costs import SimulatedCosts, StepDemand
from adaflash.simulate.policies import DecodingBatch, Policy
from adaflash.simulate.roofline import IntArray, PrefillWork
from adaflash.simulate.tally import Outcome, Tally


@dataclass(frozen=True)
class Load:
    """Who asks for what; users who each have one request at a time, or arrivals that wait for nobody.

    With users, what is measured ends when one of them has nothing left to ask, so that all are busy all the time. Of
    several users' first requests only a random share is asked for: they are out of step, as after a long time, and
    prompts come as randomly beside plain decoding as beside speculation.

    Attributes:
        num_requests: Requests in all; at least two per user.
        concurrency: Users, whose next request follows the last one's end at once; None with `request_rate`.
        request_rate: Requests per second, arriving as a Poisson process; None with `concurrency`.
        max_output_tokens: Longer answers are cut here; None takes them as they are.
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most rows of a target step.
        seed: Of arrivals and shares.
    """

    num_requests: int
    concurrency: int | None = None
    request_rate: float | None = None
    max_output_tokens: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.request_rate is None):
            raise ConfigError("give either concurrency or request_rate")
        for name, minimum in (("num_requests", 1), ("concurrency", 1), ("max_output_tokens", 2), ("max_num_seqs", 1)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name}={value} is invalid: must be >= {minimum}")
        if self.concurrency is not None and self.num_requests < 2 * self.concurrency:
            raise ConfigError(
                f"num_requests={self.num_requests} is invalid: must be >= 2 x concurrency, {2 * self.concurrency}"
            )
        if self.request_rate is not None and not 0 < self.request_rate < float("inf"):
            raise ConfigError(f"request_rate={self.request_rate} is invalid: must be finite and > 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is invalid: must be >= "
                f"max_num_seqs={self.max_num_seqs}"
            )


@dataclass(eq=False)
class _Request:
    """A request in the server.

    Attributes:
        num_computed: Prompt tokens computed.
        num_emitted: Tokens of the answer that are out; the last of them is the anchor.
        emitted_s: When the last ones were.
        num_pending: Last tokens whose drafter context is still to be written.
    """

    key: int
    answer: Answer
    num_tokens: int
    num_computed: int = 0
    num_emitted: int = 0
    emitted_s: float = 0.0
    num_pending: int = 0

    @property
    def num_context(self) -> int:
        """KV tokens before the anchor, or before the next chunk."""
        return self.num_computed + max(0, self.num_emitted - 1)


class _Plan(NamedTuple):
    decoding: list[_Request]
    caps: IntArray
    chunks: list[tuple[_Request, int]]


class _Round(NamedTuple):
    """A decoding sequence's part of a step."""

    num_verified: int
    num_accepted: int


@dataclass
class Simulation:
    """One run of a load under a policy.

    Args:
        load: Who asks.
        answers: For what.
        costs: Of the device.
        policy: Fresh: a policy that learns learns here.
        num_drafts: K.
    """

    load: Load
    answers: Answers
    costs: SimulatedCosts
    policy: Policy
    num_drafts: int
    now_s: float = 0.0
    _arrivals: deque[float] = field(default_factory=deque)
    _waiting: deque[_Request] = field(default_factory=deque)
    _running: list[_Request] = field(default_factory=list)
    _num_created: int = 0

    def run(self) -> Outcome:
        """Run until every request is answered."""
        tally = Tally(self.policy.name)
        self._open()
        while self._arrivals or self._waiting or self._running:
            self._admit_arrivals()
            if not self._waiting and not self._running:
                self.now_s = self._arrivals[0]
                continue
            self._step(tally)
        return tally.finish(self.now_s)

    def _open(self) -> None:
        load = self.load
        if load.concurrency is not None:
            shares = np.random.default_rng(load.seed).random(load.concurrency).tolist()
            for share in shares if load.concurrency > 1 else [1.0]:
                self._create(share)
            return
        assert load.request_rate is not None, "a load has users or a rate"
        gaps = np.random.default_rng(load.seed).exponential(1 / load.request_rate, load.num_requests)
        self._arrivals.extend(np.cumsum(gaps).tolist())

    def _admit_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0] <= self.now_s:
            self._arrivals.popleft()
            self._create()

    def _create(self, share: float = 1.0) -> None:
        answer = self.answers[self._num_created]
        limit = self.load.max_output_tokens
        num_tokens = answer.num_tokens if limit is None else min(limit, answer.num_tokens)
        self._waiting.append(_Request(self._num_created, answer, max(2, round(share * num_tokens))))
        self._num_created += 1

    # ---- one step --------------------------------------------------------------------------------------------

    def _step(self, tally: Tally) -> None:
        plan = self._plan()
        demand = self._demand(plan)
        batch = _batch(plan, demand)
        rounds, drafting, num_drafts = self._speculate(batch)
        num_verified = sum(r.num_verified for r in rounds)
        elapsed_s = float(demand.step_s(np.array([len(drafting)]), np.array([num_verified]), num_drafts)[0])
        elapsed_s += self._catch_up(plan.decoding, drafting)
        self.now_s += elapsed_s
        tally.add_step(elapsed_s, len(plan.decoding), len(drafting))
        if plan.decoding:
            self.policy.end_step(elapsed_s, batch)
        for request, (verified, accepted) in zip(plan.decoding, rounds, strict=True):
            num_emitted = accepted + 1
            tally.add_round(verified, num_emitted, self.now_s - request.emitted_s)
            self._emit(request, num_emitted, tally)
        for request, num_tokens in plan.chunks:
            request.num_computed += num_tokens
            if request.num_computed == request.answer.num_prompt_tokens:
                tally.add_first_token()
                self._emit(request, 1, tally)

    def _speculate(self, batch: DecodingBatch) -> tuple[list[_Round], IntArray, int]:
        """Return every sequence's round, the indices of those that drafted, and how much each drafted."""
        lens = np.zeros(len(batch.keys), dtype=np.int64)
        most = self.policy.select(batch) if batch.keys else lens
        drafting = np.flatnonzero(most > 0)
        num_drafts = self.num_drafts if self.policy.needs_whole_blocks else int(most.max(initial=0))
        if len(drafting):
            lens[drafting] = self.policy.choose(batch, drafting, num_drafts)
            caps = np.minimum(batch.caps, num_drafts)
            assert bool((lens <= caps).all()), f"policy {self.policy.name} keeps to its caps"
        accepted = np.minimum(lens, batch.num_matched)
        if len(drafting):
            self.policy.observe(accepted[drafting].tolist())
        rounds = [_Round(*pair) for pair in zip(lens.tolist(), accepted.tolist(), strict=True)]
        return rounds, drafting, num_drafts

    def _catch_up(self, decoding: list[_Request], drafting: IntArray) -> float:
        """Return the seconds of writing the context that drafting sequences put off while they decoded plainly."""
        if not self.policy.needs_drafter:
            return 0.0
        chosen = set(drafting.tolist())
        num_rows = sum(request.num_pending for i, request in enumerate(decoding) if i in chosen)
        for i, request in enumerate(decoding):
            request.num_pending = 0 if i in chosen else request.num_pending + 1
        return float(self.costs.context_s(np.array([num_rows]))[0])

    def _emit(self, request: _Request, num_tokens: int, tally: Tally) -> None:
        request.num_emitted += num_tokens
        request.emitted_s = self.now_s
        assert request.num_emitted <= request.num_tokens, "a request gets what it asked for and no more"
        if request.num_emitted < request.num_tokens:
            return
        self._running.remove(request)
        self.policy.forget(request.key)
        if self.load.concurrency is None:
            return
        if self._num_created < self.load.num_requests:
            self._create()
        else:
            tally.close(self.now_s)

    # ---- planning --------------------------------------------------------------------------------------------

    def _plan(self) -> _Plan:
        decoding = [request for request in self._running if request.num_emitted > 0]
        budget = self.load.max_num_batched_tokens - len(decoding)
        caps = []
        for request in decoding:
            caps.append(min(self.num_drafts, request.num_tokens - request.num_emitted - 1, budget))
            budget -= caps[-1] if self.policy.needs_drafter else 0
        chunks: list[tuple[_Request, int]] = []
        for request in [r for r in self._running if r.num_emitted == 0]:
            budget -= self._add_chunk(request, budget, chunks)
        while self._waiting and budget > 0 and len(self._running) < self.load.max_num_seqs:
            request = self._waiting.popleft()
            self._running.append(request)
            budget -= self._add_chunk(request, budget, chunks)
        return _Plan(decoding, np.array(caps, dtype=np.int64), chunks)

    def _add_chunk(self, request: _Request, budget: int, chunks_: list[tuple[_Request, int]]) -> int:
        num_tokens = min(request.answer.num_prompt_tokens - request.num_computed, budget)
        if num_tokens > 0:
            chunks_.append((request, num_tokens))
        return num_tokens

    def _demand(self, plan: _Plan) -> StepDemand:
        contexts = [(request.num_context, num_tokens) for request, num_tokens in plan.chunks]
        prefill = PrefillWork(
            len(contexts),
            sum(num_tokens for _, num_tokens in contexts),
            sum(before for before, _ in contexts),
            sum(num_tokens * before + num_tokens * (num_tokens + 1) // 2 for before, num_tokens in contexts),
        )
        num_context = sum(request.num_context for request in plan.decoding)
        return StepDemand(self.costs, len(plan.decoding), num_context, prefill, self.policy.needs_drafter)


def _batch(plan: _Plan, demand: StepDemand) -> DecodingBatch:
    anchors = [(request.answer, request.num_emitted - 1) for request in plan.decoding]
    matched = np.array([answer.num_matched[i] for answer, i in anchors], dtype=np.int64)
    return DecodingBatch([request.key for request in plan.decoding], plan.caps, anchors, matched, demand)
