# SPDX-License-Identifier: Apache-2.0
"""The verify policies of a simulation: the server's own code where there is such a policy, and an oracle to compare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from adaflash.config import suggest
from adaflash.errors import ConfigError
from adaflash.simulate.acceptance import Answer
from adaflash.simulate.costs import StepDemand
from adaflash.simulate.roofline import IntArray
from adaflash.speculative.budget import DraftSignals, VerifyPolicy
from adaflash.speculative.cost_model import StepCosts
from adaflash.speculative.goodput import GoodputPolicy
from adaflash.speculative.step_load import Candidate, StepLoad

GATE_NUM_RUNNING = 48
"""Upstream's length head acts only above so many running requests (ZinYY/AdaFlash#2); below, all is verified."""

_SPELLINGS = {
    "off": "off",
    "fixed": "fixed[:N]",
    "confidence": "confidence[:THRESHOLD]",
    "length_head": "length_head[:RATE]",
    "length_head_gated": "length_head_gated[:RATE]",
    "goodput": "goodput",
    "oracle": "oracle",
}


class DecodingBatch(NamedTuple):
    """The decoding sequences of a step, S of them.

    Attributes:
        keys: [S] numbers of the requests.
        caps: [S] most drafts each may verify.
        anchors: [S] answers and the tokens of theirs that the round is anchored at.
        num_matched: [S] leading drafts that are right; for the oracle only.
        demand: The step without drafts, and what it costs.
    """

    keys: list[int]
    caps: IntArray
    anchors: list[tuple[Answer, int]]
    num_matched: IntArray
    demand: StepDemand

    def signals(self, drafting: IntArray, num_drafts: int) -> DraftSignals:
        """Return what `num_drafts` drafts of each of these sequences show; whole blocks show a length ratio."""
        anchors = [self.anchors[i] for i in drafting.tolist()]
        whole = [pair for pair in anchors if pair[0].confidence.shape[1] == num_drafts]
        ratio = [float(answer.length_ratio[i]) for answer, i in whole if answer.length_ratio is not None]
        confidence = [answer.confidence[i, :num_drafts].tolist() for answer, i in anchors]
        return DraftSignals(confidence, ratio if len(ratio) == len(anchors) else None)


class Policy(ABC):
    """Decides who drafts, and how much of it is verified.

    Attributes:
        name: As it was asked for.
        needs_drafter: Whether the drafter is loaded, and so its context written.
        needs_whole_blocks: Whether all K drafts are made, however few may be verified.
    """

    name: str
    needs_drafter: bool = True
    needs_whole_blocks: bool = False

    def select(self, batch: DecodingBatch) -> IntArray:
        """Return how many drafts each sequence makes at most, [S]; all make as many as the largest of these."""
        return batch.caps

    @abstractmethod
    def choose(self, batch: DecodingBatch, drafting: IntArray, num_drafts: int) -> list[int]:
        """Return how many drafts each sequence of `drafting` verifies, `num_drafts` having been made for each."""

    # What only a policy that learns overrides.

    def observe(self, num_accepted: list[int]) -> None:  # noqa: B027
        """Take the verify results of the last `choose`, in its order."""

    def end_step(self, elapsed_s: float, batch: DecodingBatch) -> None:  # noqa: B027
        """Take the duration of a step that had decoding sequences."""

    def forget(self, key: int) -> None:  # noqa: B027
        """Drop a request that has ended."""


class Off(Policy):
    """Plain decoding, without a drafter."""

    name = "off"
    needs_drafter = False

    def select(self, batch: DecodingBatch) -> IntArray:
        """Return zeros."""
        return np.zeros_like(batch.caps)

    def choose(self, batch: DecodingBatch, drafting: IntArray, num_drafts: int) -> list[int]:
        """Return none: nothing drafts."""
        return []


class Fixed(Policy):
    """Verifies the first `num_drafts` of every block."""

    def __init__(self, name: str, num_drafts: int) -> None:
        self.name, self._num_drafts = name, num_drafts

    def select(self, batch: DecodingBatch) -> IntArray:
        """Return as many as are wanted and allowed."""
        return np.minimum(batch.caps, self._num_drafts)

    def choose(self, batch: DecodingBatch, drafting: IntArray, num_drafts: int) -> list[int]:
        """Return as many as are wanted and allowed."""
        lens: list[int] = self.select(batch)[drafting].tolist()
        return lens


class BySignals(Policy):
    """A `VerifyPolicy` of the server; with fewer than `min_running` requests all drafts are verified instead.

    Args:
        name: As it was asked for.
        policy: The server's policy.
        min_running: Smallest number of decoding sequences at which it acts.
    """

    def __init__(self, name: str, policy: VerifyPolicy, min_running: int = 0) -> None:
        self.name, self._policy, self._min_running = name, policy, min_running
        self.needs_whole_blocks = policy.name == "length_head"

    def choose(self, batch: DecodingBatch, drafting: IntArray, num_drafts: int) -> list[int]:
        """Return what the server would."""
        caps: list[int] = batch.caps[drafting].tolist()
        if len(batch.caps) < self._min_running:
            return caps
        return self._policy.choose(batch.signals(drafting, num_drafts), caps)


class Goodput(Policy):
    """The server's `goodput`, which learns during the run.

    Args:
        costs: What it takes steps to cost.
        num_drafts: K.
    """

    name = "goodput"

    def __init__(self, costs: StepCosts, num_drafts: int) -> None:
        self._policy = GoodputPolicy(costs, num_drafts)

    def select(self, batch: DecodingBatch) -> IntArray:
        """Return what it expects to win with, and what it probes."""
        candidates = _candidates(batch, np.arange(len(batch.keys)), batch.caps)
        return np.array(self._policy.select(candidates, _load(batch)), dtype=np.int64)

    def choose(self, batch: DecodingBatch, drafting: IntArray, num_drafts: int) -> list[int]:
        """Return what the server would."""
        caps = np.minimum(batch.caps, num_drafts)
        return self._policy.choose(
            batch.signals(drafting, num_drafts), _candidates(batch, drafting, caps), _load(batch)
        )

    def observe(self, num_accepted: list[int]) -> None:
        """Learn how good the drafts were."""
        self._policy.observe(num_accepted)

    def end_step(self, elapsed_s: float, batch: DecodingBatch) -> None:
        """Earn time to probe with."""
        self._policy.end_step(elapsed_s, _load(batch))

    def forget(self, key: int) -> None:
        """Drop what it knows of a request."""
        self._policy.forget(key)


class Oracle(Policy):
    """Knows before drafting how much of each block is right, drafts where that wins, and verifies no wrong draft.

    Best for the step at hand: with k drafts each of the n most successful blocks, tokens per second are
    (S + matched) / (draft_s(n, k) + verify_s(S + matched)), without the time of prompts; the best n and k are taken.
    """

    name = "oracle"

    def select(self, batch: DecodingBatch) -> IntArray:
        """Return the right drafts that are worth the draft step."""
        useful = np.minimum(batch.num_matched, batch.caps)
        order = np.argsort(-useful, kind="stable")
        order = order[useful[order] > 0]
        chosen, best_rate = np.zeros_like(useful), 0.0
        for num_drafts in range(1, int(useful.max(initial=0)) + 1):
            lens = np.minimum(useful, num_drafts)
            gained = np.concatenate(([0], np.cumsum(lens[order])))
            decoding_s = batch.demand.decoding_s(np.arange(len(order) + 1), gained, num_drafts)
            rates = (len(batch.caps) + gained) / decoding_s
            best = int(np.argmax(rates))
            if rates[best] > best_rate:
                best_rate, chosen = float(rates[best]), np.zeros_like(useful)
                chosen[order[:best]] = lens[order[:best]]
        return chosen

    def choose(self, batch: DecodingBatch, drafting: IntArray, num_drafts: int) -> list[int]:
        """Return the right ones."""
        lens: list[int] = np.minimum(batch.num_matched, batch.caps)[drafting].clip(max=num_drafts).tolist()
        return lens


def _candidates(batch: DecodingBatch, rows: IntArray, caps: IntArray) -> list[Candidate]:
    """Return greedy sequences with one version of the drafter."""
    return [Candidate(batch.keys[i], 0, 0, int(caps[i])) for i in rows.tolist()]


def _load(batch: DecodingBatch) -> StepLoad:
    demand, prefill = batch.demand, batch.demand.prefill
    return StepLoad(
        demand.num_decoding + prefill.num_seqs,
        demand.num_decoding,
        demand.num_decoding + prefill.num_tokens,
        demand.num_context + prefill.num_context,
    )


def make_policy(text: str, draft_block_size: int, has_length_ratio: bool, costs: StepCosts) -> Policy:
    """Return the policy of a spelling such as `fixed:7`.

    Args:
        text: A name, and after a colon its number.
        draft_block_size: W.
        has_length_ratio: Whether there are predictions of a length head.
        costs: What `goodput` takes steps to cost.

    Raises:
        ConfigError: There is no such policy, its number is out of range, or it needs a length head.
    """
    name, colon, value = text.partition(":")
    if name not in _SPELLINGS:
        allowed = ", ".join(_SPELLINGS.values())
        raise ConfigError(f"policy={text!r} is invalid: must be one of {allowed}{suggest(name, _SPELLINGS)}")
    if colon and name == _SPELLINGS[name]:
        raise ConfigError(f"policy={text!r} is invalid: {name} takes no number")
    if name == "off":
        return Off()
    if name == "oracle":
        return Oracle()
    if name == "goodput":
        return Goodput(costs, draft_block_size - 1)
    if name == "fixed":
        num_drafts = draft_block_size - 1
        number = _number(text, value, num_drafts, 1, num_drafts)
        if number != int(number):
            raise ConfigError(f"policy={text!r} is invalid: fixed takes an integer")
        return Fixed(text, int(number))
    if name == "confidence":
        threshold = _number(text, value, 0.3, 0.0, 1.0)
        return BySignals(text, VerifyPolicy("confidence", draft_block_size, confidence_threshold=threshold))
    if not has_length_ratio:
        raise ConfigError(f"policy={text!r} is invalid: the traces have no predictions of a length head")
    rate = _number(text, value, 1.0, 0.01, 16.0)
    head = VerifyPolicy("length_head", draft_block_size, length_head_rate=rate)
    return BySignals(text, head, GATE_NUM_RUNNING + 1 if name == "length_head_gated" else 0)


def _number(text: str, value: str, default: float, low: float, high: float) -> float:
    if not value:
        return default
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        raise ConfigError(f"policy={text!r} is invalid: its number must be in [{low:g}, {high:g}]")
    return number
