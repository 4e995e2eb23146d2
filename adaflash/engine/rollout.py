# SPDX-License-Identifier: Apache-2.0
"""Drafter versions of a running engine: introduced between two steps, watched, promoted or rolled back.

Runs in the engine's thread, on the host. What a version drafts never changes a token, so nothing here can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from adaflash.engine.request_state import RequestState
from adaflash.engine.sequence import Sequence
from adaflash.speculative.base import Drafter
from adaflash.speculative.resident import ResidentDrafters
from adaflash.training.canary import Canary, CanaryConfig, Verdict

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CanaryResult:
    """How a candidate's trial ended.

    Attributes:
        version: The candidate.
        verdict: UNDECIDED when the trial was broken off.
        candidate_acceptance_length: Tokens per drafted round with it; NaN if it never drafted.
        good_acceptance_length: The same of the version it was compared with, meanwhile.
        num_rounds: Rounds the candidate drafted on rows of its own.
        reason: Why it was not promoted.
    """

    version: int
    verdict: Verdict
    candidate_acceptance_length: float
    good_acceptance_length: float
    num_rounds: int
    reason: str


OnVerdict = Callable[[CanaryResult], None]


class DrafterRollout:
    """Introduces versions to an engine and decides about candidates.

    Args:
        drafters: The resident versions; requests acquire theirs from it.
        requests: The running requests.
    """

    def __init__(self, drafters: ResidentDrafters, requests: Mapping[str, RequestState]) -> None:
        self.drafters = drafters
        self._requests = requests
        self._canary: Canary | None = None
        self._on_verdict: OnVerdict | None = None
        self._num_compared = [0, 0]  # requests of the good version and of the candidate with rows of their own

    def introduce(
        self, drafter: Drafter, canary: CanaryConfig | None = None, on_verdict: OnVerdict | None = None
    ) -> None:
        """Let a version draft for new requests from the next step on; running ones keep theirs.

        Args:
            drafter: Packed, of the shapes being served, not resident. `drafters.has_room` must hold.
            canary: How it is tried as a candidate; None: it gets all new requests at once.
            on_verdict: Called in the engine's thread once the trial ends.
        """
        self.drafters.introduce(drafter, None if canary is None else canary.fraction)
        self._canary = None if canary is None else Canary(canary)
        self._on_verdict = on_verdict
        self._num_compared = [0, 0]
        logger.info("drafter live version=%d candidate=%s", drafter.version, canary is not None)

    def assign(self, sequences: Iterable[Sequence]) -> None:
        """Give a new request's sequences their version.

        A candidate's requests, and as many of the good version, are compared: they draft though it may not pay.
        """
        version = self.drafters.acquire()
        is_compared = self._canary is not None and (
            version == self.drafters.candidate or self._num_compared[0] < self._num_compared[1]
        )
        self._num_compared[version == self.drafters.candidate] += is_compared
        for seq in sequences:
            seq.drafter_version, seq.context_id = version, self.drafters[version].context_id
            seq.is_compared = is_compared

    def is_on_trial(self, seq: Sequence) -> bool:
        """Whether the drafts of a sequence help to decide about the candidate."""
        if self._canary is None or not (seq.is_compared and seq.is_context_pure):
            return False
        return seq.drafter_version in (self.drafters.candidate, self.drafters.good)

    def observe(self, seq: Sequence, num_tokens: int) -> None:
        """Count a drafted round that emitted `num_tokens`; only rounds on rows of its own are compared."""
        if self._canary is not None and seq.is_context_pure:
            is_candidate = seq.drafter_version == self.drafters.candidate
            if is_candidate or seq.drafter_version == self.drafters.good:
                self._canary.observe(is_candidate, seq.request.request_id, 1, num_tokens)

    def settle(self) -> None:
        """Act on the canary's verdict, if there is one; call between two steps."""
        canary = self._canary
        if canary is None or canary.verdict is Verdict.UNDECIDED:
            return
        if canary.verdict is Verdict.PROMOTE:
            self.promote()
        else:
            lengths = (
                f"{canary.candidate_acceptance_length:.3f}, {canary.good_acceptance_length:.3f} of the good version"
            )
            self.roll_back(f"acceptance length {lengths}, after {canary.num_drafts} drafts")

    def promote(self) -> None:
        """Make the candidate the good version; requests of the old one keep it until they end."""
        result = self._end_trial(Verdict.PROMOTE)
        self.drafters.promote()
        logger.info(
            "drafter promoted version=%d acceptance_length=%.3f before=%.3f rounds=%d",
            result.version,
            result.candidate_acceptance_length,
            result.good_acceptance_length,
            result.num_rounds,
        )

    def roll_back(self, reason: str) -> None:
        """Give the candidate up: its requests go on with the good version, at the price of acceptance."""
        result = self._end_trial(Verdict.ROLL_BACK, reason)
        self._drop_candidate(result.version)
        logger.warning("drafter rolled back version=%d good=%d reason=%s", result.version, self.drafters.good, reason)

    def go_back(self, drafter: Drafter) -> None:
        """Replace the good version, which has proved bad, by an older one; a candidate's trial ends undecided.

        Args:
            drafter: Packed; what is resident of that version is used instead.
        """
        bad = self.drafters.good
        if self.drafters.candidate is not None:
            result = self._end_trial(Verdict.UNDECIDED, f"version {bad}, which it was compared with, was revoked")
            self._drop_candidate(result.version)
        draining = self.drafters.draining
        if draining == drafter.version:
            self.drafters.reinstate(draining)
        else:
            if draining is not None:
                self.retire(draining)
            self.drafters.introduce(drafter)
        self.retire(bad)
        logger.warning("drafter revoked version=%d good=%d", bad, self.drafters.good)

    def retire(self, version: int) -> None:
        """Move the requests of a version that is neither good nor candidate over to the good one, which frees it."""
        for state in self._requests.values():
            if state.samples[0].seq.drafter_version == version:
                good = self.drafters.move(version)
                for sample in state.samples:
                    sample.seq.move_to_drafter(good, self.drafters.current.context_id)

    def _drop_candidate(self, version: int) -> None:
        self.drafters.roll_back()
        self.retire(version)

    def _end_trial(self, verdict: Verdict, reason: str = "") -> CanaryResult:
        candidate, canary = self.drafters.candidate, self._canary
        assert candidate is not None, "there is a candidate"
        assert canary is not None, "a candidate is watched"
        result = CanaryResult(
            candidate,
            verdict,
            canary.candidate_acceptance_length,
            canary.good_acceptance_length,
            canary.num_drafts,
            reason,
        )
        on_verdict, self._on_verdict, self._canary = self._on_verdict, None, None
        if on_verdict is not None:
            on_verdict(result)
        return result
