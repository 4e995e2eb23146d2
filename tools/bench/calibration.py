# SPDX-License-Identifier: Apache-2.0
"""How far predicted survival is from what happens, draft by draft: from the start, and after the domain changes.

The demo model answers requests of two domains (`traffic_answers.py`), and what the demo drafter proposes everywhere in
the answers is kept. The survival model then goes through the rounds of the first domain and of the second, each round
verifying either every draft or those that are likely enough to be worth it, and learns as it does while serving. The
calibration error of a window is sum_b n_b |mean prediction - mean outcome| / sum_b n_b over 10 bins of equal width, of
verified drafts, each predicted before it was learned from.

Usage: python tools/bench/calibration.py [--domains code maths] [--rounds 4000] [--window 500] [--answers FOLDER]
       [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from policies import PHASES, Traffic
from traffic_answers import TrafficAnswers

from adaflash.cli.environment import environment
from adaflash.simulate.acceptance import Answer
from adaflash.speculative.survival import SurvivalModel

SINGLE_DOMAINS = [name for name, phases in PHASES.items() if len(phases) == 1 and len(phases[0]) == 1]
NUM_BINS = 10
WORTH_IT = 0.4  # survival of drafts that `goodput` verifies on this machine, about

Pairs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """Some rounds of a domain.

    Attributes:
        domain: What was answered.
        verify: `all` drafts, or those `likely` to be accepted.
        first: Rounds of this domain before the window.
        num_rounds: Rounds of the window.
        num_verified: Drafts verified.
        accepted: Share of them that was accepted.
        error: Calibration error.
    """

    domain: str
    verify: str
    first: int
    num_rounds: int
    num_verified: int
    accepted: float
    error: float


def rounds(answers: Sequence[Answer], model: SurvivalModel, least: float) -> Iterator[Pairs]:
    """Go through answers, and yield (prediction, outcome) of each round's verified drafts, [n, 2].

    Args:
        answers: In order.
        model: Predicts, and learns.
        least: Drafts are verified while their predicted survival is at least this, and one always is.
    """
    kind = np.zeros(1, dtype=np.int64)
    for answer in answers:
        position = 0
        while position < len(answer.num_matched):
            confidence = answer.confidence[position : position + 1].astype(np.float64)
            ratio = None if answer.length_ratio is None else answer.length_ratio[position : position + 1].astype(float)
            survival = model.predict(confidence, kind, ratio)[0]
            num_verified = max(1, int((survival >= least).sum()))
            num_accepted = min(num_verified, int(answer.num_matched[position]))
            model.observe(confidence, kind, ratio, np.array([num_verified]), np.array([num_accepted]))
            outcome = np.arange(num_verified) < num_accepted
            yield np.stack((survival[:num_verified], outcome), axis=1)
            position += num_accepted + 1


def calibration_error(pairs: Pairs) -> float:
    """Return the error of (prediction, outcome) pairs, [n, 2]."""
    bins = np.minimum((pairs[:, 0] * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gaps = np.bincount(bins, weights=pairs[:, 0] - pairs[:, 1], minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(pairs))


def measure(domain: str, verify: str, seen: Sequence[Pairs], size: int) -> list[Window]:
    """Return the windows of a domain's rounds."""
    windows = []
    for first in range(0, len(seen) - size + 1, size):
        pairs = np.concatenate(seen[first : first + size])
        windows.append(
            Window(domain, verify, first, size, len(pairs), float(pairs[:, 1].mean()), calibration_error(pairs))
        )
    return windows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domains", nargs="+", choices=SINGLE_DOMAINS, default=["code", "maths"])
    parser.add_argument("--rounds", type=int, default=4000, help="of each domain at most")
    parser.add_argument("--window", type=int, default=500, help="rounds that one error is of")
    parser.add_argument("--num-answers", type=int, default=120, help="of each domain")
    parser.add_argument("--answers", type=Path, metavar="FOLDER", help="keeps what is recorded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not 0 < args.window <= args.rounds or args.num_answers < 1 or args.seed < 0:
        parser.error("--window must be in [1, --rounds], --num-answers positive, --seed not negative")
    return args


def main() -> None:
    """Record what is missing, go through the rounds, and print a table."""
    args = _arguments()
    answers: dict[str, list[Answer]] = {}
    for domain in args.domains:
        path = None if args.answers is None else args.answers / f"{domain}.npz"
        recorded = TrafficAnswers(Traffic(domain, 0.0, args.seed), path).first(args.num_answers)
        answers[domain] = [recorded[index] for index in range(args.num_answers)]
    num_positions = answers[args.domains[0]][0].confidence.shape[1]
    windows: list[Window] = []
    for verify, least in (("all", 0.0), ("likely", WORTH_IT)):
        model = SurvivalModel(num_positions)
        for domain in args.domains:
            seen = [pairs for pairs, _ in zip(rounds(answers[domain], model, least), range(args.rounds), strict=False)]
            windows += measure(domain, verify, seen, args.window)
    print("domain   verify   rounds        verified  accepted  calibration error")
    for w in windows:
        span = f"{w.first}-{w.first + w.num_rounds}"
        print(f"{w.domain:8s} {w.verify:8s} {span:12s} {w.num_verified:9d} {w.accepted:9.3f} {w.error:9.3f}")
    if args.json is not None:
        report = {"windows": [asdict(w) for w in windows], "environment": environment()}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
