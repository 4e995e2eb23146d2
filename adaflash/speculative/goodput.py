# SPDX-License-Identifier: Apache-2.0
"""The verify policy `goodput`: who drafts, and how much of it is verified, by expected tokens per second of the batch.

Decides from draft distributions, measured costs and past verify results, never from a drafted token, so sampling stays
lossless under either coupling. Host only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from adaflash.speculative.allocation import FloatArray, IntArray, allocate
from adaflash.speculative.budget import DraftSignals
from adaflash.speculative.caution import Caution
from adaflash.speculative.cost_model import StepCosts
from adaflash.speculative.cost_table import knots_up_to
from adaflash.speculative.draft_history import DraftHistory
from adaflash.speculative.step_load import Candidate, StepLoad
from adaflash.speculative.survival import NUM_TEMPERATURE_CLASSES, SurvivalModel
from adaflash.speculative.typical_signals import TypicalSignals

# Drafting begins when it is expected to bring this much more than it costs, and goes on while it brings that: no
# flapping, and the best of many uncertain prospects is worth less than it seems.
_START_MARGIN, _STAY_MARGIN = 1.25, 1.1
# Share of the time that may be spent on finding out whether drafting pays: least, what success adds, and what a drafter
# adds that is not well known yet. The very first drafts cost what they cost.
_LEAST_PROBING, _SUCCESS_PROBING, _NEW_PROBING = 0.004, 0.008, 0.02
_NUM_FREE_PROBES = 24
_PROBE_MEMORY = 0.95  # of the share of probes that found a gain
_NOVELTY = 0.97  # per draft of a version: how soon a version counts as known
_REFRESH_STEPS = 4  # after so many steps with drafts, what earlier ones promised is predicted anew
_PROBED_ROWS = 0.5  # what a probe verifies may cost this much of what its draft cost
_HORIZON = 16  # a sequence that turns out to gain is expected to draft so often
_FIRST_ROWS = 2.0  # drafts verified per sequence that drafts, before anything is known
_ROWS_MEMORY = 0.7
_ITERATIONS = 2
_PROBE_DRAFTS = 3  # of a block that only probes
_WHOLE_BLOCK_STEPS = 16  # of steps with drafts, every so-manieth drafts whole blocks, to know what narrow ones miss
_MAX_VERSIONS = 2  # as many as are resident
_TRIAL_STEPS = 8  # between two steps in which all sequences on trial draft, together so that it takes few forwards
_RECONSIDER_STEPS = 8  # while nothing drafts and the same sequences run


class _Drafted(NamedTuple):
    candidates: list[Candidate]
    confidence: FloatArray  # [n, K]
    length_ratio: FloatArray | None  # [n]
    num_verified: list[int]


class GoodputPolicy:
    """Maximises expected committed tokens per second, for all sequences together.

    Before drafting, `select` weighs what past drafts promised against the cost of a draft forward, for blocks of every
    width; where plain decoding wins nothing is drafted, but for probes, whose cost is bounded. After drafting, `choose`
    splits the rows by the calibrated survival of these very drafts. `observe` and `end_step` close the loop.

    Args:
        costs: Seconds of steps; refined by whoever measures them.
        num_positions: K.

    Attributes:
        calibration_error: Expected calibration error of the last used version's survival; 0 before any draft.
        is_drafting: Whether drafting was last expected to pay for some sequence.
        expected_tokens: Of each sequence of the last `choose`, the drafts expected to be accepted.
    """

    def __init__(self, costs: StepCosts, num_positions: int) -> None:
        self.costs = costs
        self.calibration_error = 0.0
        self.is_drafting = False
        self.expected_tokens: list[float] = []
        self._num_positions = num_positions
        self._models: dict[int, SurvivalModel] = {}  # by version, the one used last at the end
        self._history = DraftHistory(num_positions, NUM_TEMPERATURE_CLASSES)
        self._typical = TypicalSignals(num_positions, NUM_TEMPERATURE_CLASSES)
        self._lengths = _draft_lengths(num_positions)
        self._num_drafts = min(_PROBE_DRAFTS, num_positions)  # of each block, this step
        self._steps_to_whole = 0
        self._rows = _FIRST_ROWS
        self._caution = Caution()
        self._probe_success = 1.0
        self._credit_s = 0.0
        self._probes: set[int] = set()
        self._probe_s = 0.0  # what the cheapest probe would have cost last time
        self._idle_keys: list[int] = []
        self._idle_steps = 0
        self._num_steps = 0
        self._drafted: _Drafted | None = None
        self._num_accepted: int | None = None  # of a step that did more than probe
        self._steps_to_refresh = _REFRESH_STEPS

    # ---- who drafts ------------------------------------------------------------------------------------------

    def select(self, candidates: list[Candidate], load: StepLoad) -> list[int]:
        """Return how many drafts each sequence makes in this step at most; 0 where it does not draft.

        All blocks of a step are as wide as the largest of these.
        """
        able = [c for c in candidates if c.max_drafts > 0]
        self._num_steps += 1
        self._num_drafts = min(_PROBE_DRAFTS, self._num_positions)
        self._probes = self._due_for_trial(able, load)
        keys = [c.key for c in able]
        self._idle_steps = self._idle_steps + 1 if keys == self._idle_keys else 0
        is_settled = not self._probes and 0 < self._idle_steps < _RECONSIDER_STEPS and self._credit_s < self._probe_s
        if not able or is_settled:
            return [0] * len(candidates)
        chosen = self._profitable(able, load) | self._probes
        chosen |= self._worth_a_look([c for c in able if c.key not in chosen], len(chosen), load)
        chosen |= self._pick_probes([c for c in able if c.key not in chosen], len(chosen), load)
        self._idle_steps, self._idle_keys = 0, [] if chosen else keys
        if chosen and self._steps_to_whole <= 0 and load.max_step_s == math.inf:
            self._num_drafts = self._num_positions
        return [min(c.max_drafts, self._num_drafts) if c.key in chosen else 0 for c in candidates]

    def _due_for_trial(self, able: list[Candidate], load: StepLoad) -> set[int]:
        due = {c.key for c in able if c.is_on_trial} if self._num_steps % _TRIAL_STEPS == 0 else set()
        if due and float(self._draft_s(np.array([len(due)]), load)[0]) + self._plain_s(load) > load.max_step_s:
            return set()
        return due

    def _profitable(self, able: list[Candidate], load: StepLoad) -> set[int]:
        """Return the sequences whose drafts together gain more tokens than decoding would in the time of drafting.

        A set D with rows B gains iff (S + tokens(D)) / (t_draft(D) + t_verify(B)) > rate, that is surplus(D) =
        tokens(D) - rate * (t_verify(B) - t_verify(0)) > rate * t_draft(D). Once with the rate of plain decoding, which
        decides whether drafting wins, then with the rate of the best set, which decides its size (Dinkelbach). The
        width of the blocks is chosen with the set: a narrow one costs less and promises less.
        """
        keys = [c.key for c in able]
        classes, caps = _arrays(able)
        plain_s, rate = self._plain_s(load), self._plain_rate(load)
        draft_s = self.costs.draft_s(np.arange(1, len(able) + 1), load.num_context, self._lengths[:, None])  # [m, n]
        is_short = draft_s + plain_s <= load.max_step_s
        margin = _STAY_MARGIN if self.is_drafting else _START_MARGIN
        chosen: set[int] = set()
        for _ in range(_ITERATIONS):
            prospect = self._history.prospect(keys, classes, caps, self._price(rate, len(able), load), self._lengths)
            order = np.argsort(-prospect.surplus, axis=1, kind="stable")  # [m, n]
            cost = margin * self._caution.factor * rate * draft_s
            promised = np.cumsum(np.take_along_axis(prospect.surplus, order, axis=1), axis=1)
            gain = np.where(is_short, promised - cost, -np.inf)
            length, last = divmod(int(np.argmax(gain)), len(able))
            if gain[length, last] <= 0:
                break
            taken = order[length, : last + 1]
            chosen, self._num_drafts = {keys[i] for i in taken}, int(self._lengths[length])
            tokens, rows = float(prospect.tokens[length, taken].sum()), float(prospect.rows[length, taken].sum())
            rate, margin = self._rate(tokens, rows, plain_s, float(draft_s[length, last]), load), 1.0
        self.is_drafting = bool(chosen)
        return chosen

    def _worth_a_look(self, others: list[Candidate], num_drafting: int, load: StepLoad) -> set[int]:
        """Return new sequences whose first draft is worth its price for what it may find.

        Of the last ones some gained and some did not. A first draft costs its share of the draft forward once; one in
        so many finds a sequence that gains its surplus, less the share, with each of its later drafts.
        """
        num_drafts = self._history.num_drafts([c.key for c in others]) if others else np.zeros(0)
        new = [c for c, count in zip(others, num_drafts, strict=True) if not count]
        if not new:
            return set()
        plain_s, rate = self._plain_s(load), self._plain_rate(load)
        draft_s = self._draft_s(np.array([num_drafting, num_drafting + len(new)]), load)
        if draft_s[1] + plain_s > load.max_step_s:
            return set()
        share = rate * float(draft_s[1] - draft_s[0]) / len(new)
        price = self._price(rate, len(new), load)
        worth: set[int] = set()
        for kind in {c.temperature_class for c in new}:
            surplus = self._history.surplus_after_first(kind, price, self._num_drafts)
            if len(surplus):
                gain = float(np.maximum(surplus - share, 0.0).mean())
                alike = [c for c in new if c.temperature_class == kind]
                worth |= {c.key for c in alike if gain * min(_HORIZON, c.max_drafts * 2) > share}
        return worth

    def _rate(self, tokens: float, rows: float, plain_s: float, draft_s: float, load: StepLoad) -> float:
        num_tokens = np.array([load.num_tokens + round(rows)])
        verify_s = float(self.costs.verify_s(load.num_seqs, num_tokens, load.num_context)[0])
        seconds = draft_s + max(verify_s, plain_s) - self._prefill_s(load)
        return max((load.num_decoding + tokens) / seconds, self._plain_rate(load))

    def _price(self, rate: float, num_drafting: int, load: StepLoad) -> float:
        """Return the tokens that verifying one draft costs, if as many are verified as lately."""
        rows = max(1, round(self._rows * num_drafting))
        seconds = self.costs.verify_s(load.num_seqs, np.array([0, rows]) + load.num_tokens, load.num_context)
        return self._caution.factor * rate * max(0.0, float(seconds[1] - seconds[0])) / rows

    def _pick_probes(self, others: list[Candidate], num_drafting: int, load: StepLoad) -> set[int]:
        """Return sequences to draft for to learn, as far as the credit goes: all that never drafted, else one."""
        if not others:
            return set()
        num_drafts = self._history.num_drafts([c.key for c in others])
        new = np.flatnonzero(num_drafts == 0)
        order = [others[i].key for i in (new if len(new) else [int(np.argmin(num_drafts))])]
        draft_s = self._draft_s(np.arange(num_drafting, num_drafting + len(order) + 1), load)
        plain_s = self._plain_s(load)
        row_s = self._price(load.num_decoding / plain_s, len(order), load) * plain_s / load.num_decoding
        cost_s = draft_s[1:] - draft_s[0] + row_s * np.arange(1, len(order) + 1)
        is_short = draft_s[1:] + plain_s <= load.max_step_s
        is_free = self._num_known < _NUM_FREE_PROBES
        self._probe_s = 0.0 if is_free else float(cost_s[0])
        count = int((((cost_s <= self._credit_s) | is_free) & is_short).sum())
        if count == 0:
            return set()
        self._credit_s = max(0.0, self._credit_s - float(cost_s[count - 1]))
        probes = set(order[:count])
        self._probes |= probes
        return probes

    # ---- how much is verified --------------------------------------------------------------------------------

    def choose(self, signals: DraftSignals, drafting: list[Candidate], load: StepLoad) -> list[int]:
        """Return how many drafts each of `drafting` verifies; a probe verifies some whatever they promise."""
        classes, caps = _arrays(drafting)
        self._probes &= {c.key for c in drafting}  # where KV runs out, not all that were selected draft
        self._num_drafts = len(signals.confidence[0])
        is_whole = self._num_drafts == self._num_positions
        self._steps_to_whole = _WHOLE_BLOCK_STEPS if is_whole else self._steps_to_whole - 1
        confidence, ratio = self._typical.complete(signals, classes)
        survival = self._predict(confidence, ratio, drafting, classes)
        self._history.add([c.key for c in drafting], classes, survival, confidence, ratio)
        budgets = load.num_tokens + np.arange(int(caps.sum()) + 1)
        verify_s = self.costs.verify_s(load.num_seqs, budgets, load.num_context)
        whole_s = verify_s + self._draft_s(np.array([len(drafting)]), load)
        # What is spent on learning does not make verifying any cheaper.
        step_s = np.array(verify_s if len(self._probes) == len(drafting) else whole_s)
        step_s += (self._caution.factor - 1) * (verify_s - verify_s[0]) - self._prefill_s(load)
        step_s[1:][whole_s[1:] > load.max_step_s] = np.inf
        lens = allocate(survival, caps, step_s, load.num_decoding).lens
        if self._probes:
            least = self._probed_rows(len(drafting), load)
            more = [
                max(n, min(least, c.max_drafts)) if c.key in self._probes else n
                for c, n in zip(drafting, lens, strict=True)
            ]
            lens = more if step_s[sum(more)] < np.inf else lens
        self._rows = _ROWS_MEMORY * self._rows + (1 - _ROWS_MEMORY) * sum(lens) / len(lens)
        self.expected_tokens = [float(row[:n].sum()) for row, n in zip(survival, lens, strict=True)]
        self._judge_probes(survival, drafting, load)
        self._drafted = _Drafted(drafting, confidence, ratio, lens)
        return lens

    def _probed_rows(self, num_drafting: int, load: StepLoad) -> int:
        """Return how many drafts a probe verifies at least, so that survival is learned wherever it costs little."""
        rate = self._plain_rate(load)
        row_s = self._price(rate, num_drafting, load) / rate
        draft_s = float(self._draft_s(np.array([num_drafting]), load)[0]) / num_drafting
        return max(1, min(self._num_drafts, int(_PROBED_ROWS * draft_s / max(row_s, 1e-12))))

    def _judge_probes(self, survival: FloatArray, drafting: list[Candidate], load: StepLoad) -> None:
        """Probe more while probes find what pays."""
        if not self._probes:
            return
        rows = [i for i, c in enumerate(drafting) if c.key in self._probes]
        rate = self._plain_rate(load)
        price = self._price(rate, len(rows), load)
        surplus = np.maximum(survival[rows, : self._num_drafts] - price, 0.0).sum(axis=1)
        per_draft = rate * float(self._draft_s(np.array([len(drafting)]), load)[0]) / len(drafting)
        success = float((surplus > per_draft).mean())
        self._probe_success = _PROBE_MEMORY * self._probe_success + (1 - _PROBE_MEMORY) * success

    def _predict(
        self, confidence: FloatArray, ratio: FloatArray | None, drafting: list[Candidate], classes: IntArray
    ) -> FloatArray:
        survival = np.empty_like(confidence)
        for version, rows in _by_version(drafting):
            part = None if ratio is None else ratio[rows]
            survival[rows] = self._model(version).predict(confidence[rows], classes[rows], part)
        return survival

    def _model(self, version: int) -> SurvivalModel:
        """Return the calibration of a drafter version; a new one starts as the last used, less certain."""
        model = self._models.pop(version, None)
        if model is None:
            if self._models:
                model = copy.deepcopy(self._latest)
                model.shift()
            else:
                model = SurvivalModel(self._num_positions)
        self._models[version] = model
        while len(self._models) > _MAX_VERSIONS:
            del self._models[next(iter(self._models))]
        return model

    @property
    def _latest(self) -> SurvivalModel:
        """The calibration used last; an older version's after going back to it."""
        return next(reversed(self._models.values()))

    # ---- what happened ---------------------------------------------------------------------------------------

    def observe(self, num_accepted: list[int]) -> None:
        """Learn from the verify results of the last `choose`, in its order."""
        drafted, self._drafted = self._drafted, None
        assert drafted is not None, "verify results follow a choice"
        classes, _ = _arrays(drafted.candidates)
        confidence, ratio = drafted.confidence, drafted.length_ratio
        verified, accepted = np.array(drafted.num_verified), np.array(num_accepted)
        if len(self._probes) < len(accepted):
            self._num_accepted = int(accepted.sum())
        for version, rows in _by_version(drafted.candidates):
            part = None if ratio is None else ratio[rows]
            self._model(version).observe(confidence[rows], classes[rows], part, verified[rows], accepted[rows])
        self.calibration_error = self._latest.calibration_error
        self._steps_to_refresh -= 1
        if self._steps_to_refresh == 0:
            self._steps_to_refresh = _REFRESH_STEPS
            self._history.refresh(self._latest.predict)

    def end_step(self, elapsed_s: float, load: StepLoad) -> None:
        """Compare a step with plain decoding, and grant a share of its time to probing."""
        self._compare(elapsed_s, load)
        count = np.array([max(1, load.num_decoding)])
        most = float(self.costs.draft_s(count, load.num_context, self._num_positions)[0]) + self._plain_s(load)
        novelty = _NOVELTY ** max(0, self._num_known - _NUM_FREE_PROBES)
        share = _LEAST_PROBING + _SUCCESS_PROBING * self._probe_success + _NEW_PROBING * novelty
        self._credit_s = min(self._credit_s + share * elapsed_s, most)

    def _compare(self, elapsed_s: float, load: StepLoad) -> None:
        """Judge by what came of them whether drafts pay; probes are not expected to."""
        accepted, self._num_accepted = self._num_accepted, None
        if accepted is None:
            self._caution.rest()
            return
        plain_s = self._plain_s(load)
        gain = accepted / load.num_decoding - (elapsed_s - plain_s) * self._plain_rate(load) / load.num_decoding
        self._caution.judge(gain)

    def forget(self, key: int) -> None:
        """Drop a sequence that has ended."""
        self._history.forget(key)

    @property
    def _num_known(self) -> int:
        """Drafts that the version used last is known by."""
        return self._latest.num_drafts if self._models else 0

    def _plain_s(self, load: StepLoad) -> float:
        return float(self.costs.verify_s(load.num_seqs, np.array([load.num_tokens]), load.num_context)[0])

    def _prefill_s(self, load: StepLoad) -> float:
        """Return the part of a plain step that prompts take: it must be spent anyway, whoever drafts."""
        rows = np.array([load.num_decoding, load.num_tokens])
        decode_s, plain_s = self.costs.verify_s(load.num_seqs, rows, load.num_context).tolist()
        return max(0.0, float(plain_s) - float(decode_s))

    def _plain_rate(self, load: StepLoad) -> float:
        """Return the tokens per second of decoding plainly, prompts apart."""
        return load.num_decoding / (self._plain_s(load) - self._prefill_s(load))

    def _draft_s(self, num_drafting: IntArray, load: StepLoad) -> FloatArray:
        """Return the seconds of a draft forward as wide as this step's."""
        return self.costs.draft_s(num_drafting, load.num_context, self._num_drafts)


def _draft_lengths(num_positions: int) -> IntArray:
    """Return the numbers of drafts that are weighed: 1, 2, 3, 5, 7, 11, 15, 23 ... below K, and K."""
    knots = [knot - 1 for knot in knots_up_to(num_positions + 1) if knot > 1]
    return np.array(knots)


def _arrays(candidates: list[Candidate]) -> tuple[IntArray, IntArray]:
    """Return temperature classes and caps, [n] each."""
    return np.array([c.temperature_class for c in candidates]), np.array([c.max_drafts for c in candidates])


def _by_version(candidates: list[Candidate]) -> Iterable[tuple[int, IntArray]]:
    versions = np.array([c.drafter_version for c in candidates])
    for version in np.unique(versions).tolist():
        yield version, np.flatnonzero(versions == version)
