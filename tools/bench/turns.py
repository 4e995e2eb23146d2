# SPDX-License-Identifier: Apache-2.0
"""Turns that several arms took in rounds: what they add up to, how arms compare, and how sure that is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000


class Slice(NamedTuple):
    """What one turn did, or the sum of several.

    Attributes:
        num_tokens: Output tokens emitted.
        num_rounds: Decode rounds, one per running request and target forward.
        num_emitted_tokens: Output tokens of those rounds; without the first token of a request.
        num_verified_tokens: Drafts verified.
        num_decode_steps: Engine steps with a decode round.
        num_draft_steps: Those in which the drafter ran.
    """

    seconds: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0
    num_emitted_tokens: int = 0
    num_verified_tokens: int = 0
    num_decode_steps: int = 0
    num_draft_steps: int = 0

    @staticmethod
    def total(slices: Sequence[Slice]) -> Slice:
        """Add up at least one slice."""
        return Slice(*map(sum, zip(*slices, strict=True)))


class Round(NamedTuple):
    """One turn of every arm, by arm; `phase` indexes the phases of the traffic."""

    phase: int
    slices: dict[str, Slice]


class Ratio(NamedTuple):
    """A ratio of throughputs and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One arm at one concurrency.

    Attributes:
        phase: `all`, or `shifted` for the rounds after the shift.
        to_off: Against the arm `off`; None when it is not measured.
        to_best: Against the arm of the highest tokens/s in these rounds.
        acceptance_length: Tokens emitted per decode round, bonus token included.
        verified_per_token: Drafts verified per output token.
        drafting_share: Decode steps in which the drafter ran.
    """

    arm: str
    concurrency: int
    phase: str
    num_rounds: int
    seconds: float
    num_tokens: int
    tokens_per_s: float
    to_off: Ratio | None
    to_best: Ratio
    acceptance_length: float
    verified_per_token: float
    drafting_share: float


def summarize(names: Sequence[str], rounds: Sequence[Round], concurrency: int, phase: str, seed: int) -> list[Row]:
    """Return one row per arm of at least one round."""
    totals = {name: Slice.total([turn.slices[name] for turn in rounds]) for name in names}
    speeds = {name: total.num_tokens / total.seconds for name, total in totals.items()}
    best = max(speeds, key=lambda name: speeds[name])
    resampled = _resampled_speeds(rounds, names, seed)

    def ratio(name: str, reference: str) -> Ratio:
        low, high = np.percentile(resampled[name] / resampled[reference], (2.5, 97.5)).tolist()
        return Ratio(speeds[name] / speeds[reference], low, high)

    return [
        Row(
            name,
            concurrency,
            phase,
            len(rounds),
            total.seconds,
            total.num_tokens,
            speeds[name],
            ratio(name, "off") if "off" in totals else None,
            ratio(name, best),
            total.num_emitted_tokens / max(1, total.num_rounds),
            total.num_verified_tokens / max(1, total.num_tokens),
            total.num_draft_steps / max(1, total.num_decode_steps),
        )
        for name, total in totals.items()
    ]


def _resampled_speeds(rounds: Sequence[Round], names: Sequence[str], seed: int) -> dict[str, NDArray[np.float64]]:
    """Return tokens/s of every arm in each resample of the rounds, [NUM_RESAMPLES]; the same rounds for all arms."""
    chosen = np.random.default_rng(seed).integers(len(rounds), size=(NUM_RESAMPLES, len(rounds)))
    speeds = {}
    for name in names:
        tokens = np.array([turn.slices[name].num_tokens for turn in rounds])
        seconds = np.array([turn.slices[name].seconds for turn in rounds])
        speeds[name] = tokens[chosen].sum(1) / seconds[chosen].sum(1)
    return speeds


def show(rows: Sequence[Row]) -> None:
    """Print the rows of one concurrency and phase in 80 columns."""
    first = rows[0]
    title = f"concurrency {first.concurrency}, {first.num_rounds} rounds"
    print(f"\n{title}{', after the shift only' if first.phase == 'shifted' else ''}; in brackets 95 % intervals")
    print(f"{'arm':15s}{'tok/s':>7s}  {'to off':17s} {'to best':17s}{'length':>6s}{'ver/tok':>8s}{'drafts':>7s}")
    for row in rows:
        figures = f"{row.acceptance_length:6.2f}{row.verified_per_token:8.2f}{row.drafting_share:7.0%}"
        print(f"{row.arm:15s}{row.tokens_per_s:7.1f}  {_text(row.to_off):17s} {_text(row.to_best):17s}{figures}")
    sys.stdout.flush()


def _text(ratio: Ratio | None) -> str:
    return "-" if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
