# SPDX-License-Identifier: Apache-2.0
"""Losses compared on recorded greedy trajectories: how far the drafter adapts to a new domain, and what it forgets.

The demo model answers prompts of a domain that is new to the shipped drafter, and code prompts (old), once; answers and
the target's features are kept in --data. Every run then trains the shipped drafter on answers of the new domain with
one loss and one seed, and replays held-out answers of both. Runs of a seed see the same trajectories and anchors, so
they are compared in pairs. Held-out prompts share templates, not numbers and names, with those trained on.

What was done is kept: the same command goes on where another, or a --time-limit, stopped.

Usage: python tools/bench/adaptation.py --data DIR --json FILE [--variants ce osd ...] [--seeds 0 1 2] [--steps N]
       [--domain maths|records] [--freeze-context] [--replay-share X] [--time-limit S]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from recorded_answers import NEW_DOMAINS, Deadline, RecordedAnswers, SetSizes

from adaflash.cli.environment import environment
from adaflash.demo.drafter import demo_drafter_dir
from adaflash.demo.model import demo_model_dir
from adaflash.ops.backend import Backend
from adaflash.ops.registry import load_backend
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_config import load_drafter_config
from adaflash.training.learner import Learner
from adaflash.training.replay import ReplayResult, replay
from adaflash.training.supervision import Supervision
from adaflash.training.target_head import TargetHead
from adaflash.training.trainer_config import TrainerConfig

VARIANTS: dict[str, dict[str, object]] = {
    "ce": {"loss": "ce", "weighting": "decay"},
    "reverse_kl": {"loss": "reverse_kl", "alpha": 0.8, "clip": "term", "clip_nats": 0.5, "weighting": "decay"},
    "reverse_kl_row_clip": {
        "loss": "reverse_kl",
        "alpha": 0.8,
        "clip": "position",
        "clip_share": 0.01,
        "weighting": "decay",
    },
    "osd": {"loss": "forward_kl", "alpha": 0.0, "clip": "none", "weighting": "decay"},
    "ce_credit": {"loss": "ce", "weighting": "credit"},
    "reverse_kl_credit": {"loss": "reverse_kl", "alpha": 0.8, "clip": "term", "clip_nats": 0.5, "weighting": "credit"},
}


@dataclass(frozen=True)
class RunSpec:
    """What distinguishes one training run from another."""

    variant: str
    seed: int
    steps: int
    lr: float
    freeze_context: bool
    replay_share: float
    warmup_steps: int = 50

    @property
    def group(self) -> tuple[object, ...]:
        """What runs have in common that differ by seed only."""
        return (self.variant, self.steps, self.lr, self.freeze_context, self.replay_share, self.warmup_steps)

    @property
    def label(self) -> str:
        """Name of the group in tables."""
        frozen = "+frozen" if self.freeze_context else ""
        return self.variant + frozen + (f"+replay {self.replay_share:g}" if self.replay_share else "")


@dataclass(frozen=True)
class Acceptance:
    """Replay of the held-out answers of a domain, every draft verified.

    Attributes:
        per_position: Share of rounds that accepted the draft at each position.
    """

    acceptance_length: float
    per_position: list[float]
    num_rounds: int
    num_emitted_tokens: int


@dataclass(frozen=True)
class Evaluation:
    """The drafter after some steps, `train_s` seconds of training."""

    step: int
    train_s: float
    acceptance: dict[str, Acceptance]


@dataclass(frozen=True)
class Run:
    """One finished training run.

    Attributes:
        stale: The trained drafter over context rows the shipped one wrote: what a request that was running, or a
            cached prefix, would meet that kept its rows across every version in between.
    """

    spec: RunSpec
    num_threads: int
    evaluations: list[Evaluation]
    stale: dict[str, Acceptance]


class Bench:
    """The shipped drafter, and answers to train and replay it on.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.deadline = Deadline(args.time_limit)
        self._num_evaluations: int = args.evaluations
        self._draft, self._backend = demo_drafter_dir(), load_backend("cpu")
        model = demo_model_dir()
        self._head = TargetHead(model, self._backend)
        sizes = SetSizes(args.num_train, args.num_heldout, args.num_code, args.num_replay, args.max_tokens)
        taps = load_drafter_config(self._draft).tap_layer_ids
        self.answers = RecordedAnswers(
            args.domain, args.data, sizes, model, self._head, self._backend, taps, self.deadline
        )
        self.shipped = self.learner(TrainerConfig(train_length_head=False)).drafter

    def learner(self, config: TrainerConfig) -> Learner:
        """Return the shipped drafter, ready to be trained."""
        return Learner(self._draft, self._head, Backend(self._backend.device), config)

    def evaluate(self, drafter: DFlashDrafter, context_drafter: DFlashDrafter | None = None) -> dict[str, Acceptance]:
        """Replay the held-out answers of every domain; `context_drafter` wrote the context rows, by default it did."""
        limit, acceptance = self.answers.sizes.max_tokens, {}
        for name in (self.answers.domain, "code"):
            results = [
                replay(drafter, item.sequence, item.taps, max_output_tokens=limit, context_drafter=context_drafter)
                for item in self.answers[name]
            ]
            acceptance[name] = _acceptance(ReplayResult.total(results))
        return acceptance

    def run(self, spec: RunSpec) -> Run:
        """Train from the shipped weights and evaluate at even intervals, at the end last."""
        fields = {
            "lr": spec.lr,
            "warmup_steps": spec.warmup_steps,
            "freeze_context": spec.freeze_context,
            "train_length_head": False,
        }
        config = TrainerConfig.from_mapping({**VARIANTS[spec.variant], **fields})
        learner = self.learner(config)
        new, old = self.answers[f"{self.answers.domain}_train"], self.answers["code_train"] if spec.replay_share else []
        generator = torch.Generator().manual_seed(spec.seed)
        evaluate_at = {spec.steps * k // self._num_evaluations for k in range(1, self._num_evaluations + 1)}
        evaluations, train_s = [], 0.0
        for step in range(1, spec.steps + 1):
            started = time.perf_counter()
            batch = _draw(config.trajectories_per_step, new, old, spec.replay_share, generator)
            report = learner.step(batch, generator)
            train_s += time.perf_counter() - started
            if report is not None and not report.is_applied:
                raise SystemExit(f"{spec}: loss or gradient of step {step} is not finite")
            if step in evaluate_at:
                evaluations.append(Evaluation(step, train_s, self.evaluate(learner.drafter)))
        return Run(spec, torch.get_num_threads(), evaluations, self.evaluate(learner.drafter, self.shipped))


def _draw(
    count: int,
    new: Sequence[Supervision],
    old: Sequence[Supervision],
    replay_share: float,
    generator: torch.Generator,
) -> list[Supervision]:
    """Draw trajectories, each of `old` with a chance of `replay_share`; the generator moves on alike at any share."""
    chances = torch.rand(count, 2, generator=generator, dtype=torch.float64).tolist()
    pools = [old if kind < replay_share else new for kind, _ in chances]
    return [pool[int(place * len(pool))] for pool, (_, place) in zip(pools, chances, strict=True)]


def _acceptance(total: ReplayResult) -> Acceptance:
    per_position = [count / total.num_rounds for count in total.num_accepted_per_position]
    return Acceptance(total.acceptance_length, per_position, total.num_rounds, total.num_emitted_tokens)


class Results:
    """Finished runs in a JSON file, written after each of them.

    Args:
        path: Read when it exists.
        setup: What all runs have in common; those in the file must agree.
    """

    def __init__(self, path: Path, setup: dict[str, object]) -> None:
        self._path, self._setup = path, setup
        self.before: Evaluation | None = None
        self.runs: list[Run] = []
        if path.exists():
            report = json.loads(path.read_text(encoding="utf-8"))
            if report["setup"] != setup:
                raise SystemExit(f"{path} has another setup ({report['setup']}, not {setup}): give another --json")
            self.before = _evaluation(report["before"])
            self.runs = [
                Run(
                    RunSpec(**run["spec"]),
                    run["num_threads"],
                    list(map(_evaluation, run["evaluations"])),
                    _by_domain(run["stale"]),
                )
                for run in report["runs"]
            ]

    def save(self) -> None:
        """Replace the file."""
        assert self.before is not None, "the shipped drafter is evaluated first"
        report = {
            "setup": self._setup,
            "environment": environment(),
            "before": asdict(self.before),
            "runs": [asdict(run) for run in self.runs],
        }
        unfinished = self._path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self._path)

    def groups(self) -> list[list[Run]]:
        """Return the runs that differ by seed only, together."""
        grouped: dict[tuple[object, ...], list[Run]] = {}
        for run in self.runs:
            grouped.setdefault(run.spec.group, []).append(run)
        return list(grouped.values())


def _evaluation(fields: dict[str, object]) -> Evaluation:
    return Evaluation(**fields | {"acceptance": _by_domain(fields["acceptance"])})  # type: ignore[arg-type]


def _by_domain(values: object) -> dict[str, Acceptance]:
    assert isinstance(values, dict), "acceptance is kept by domain"
    return {name: Acceptance(**each) for name, each in values.items()}


def print_summary(results: Results, domain: str) -> None:
    """Print one row per group: mean (lowest - highest) over seeds, and the mean difference from `ce` of a seed."""
    if results.before is not None:
        print("before: " + ", ".join(f"{k} {v.acceptance_length:.3f}" for k, v in results.before.acceptance.items()))
    reference = {(run.spec.seed, run.spec.steps, run.spec.lr): run for run in results.runs if run.spec.label == "ce"}
    print(
        f"{'loss':28s}      lr steps seeds {domain:>20s} {'against ce':>22s} {'stale context':>20s} {'code':>20s} "
        "train s   by position"
    )
    for runs in results.groups():
        spec, last = runs[0].spec, [run.evaluations[-1] for run in runs]
        lengths = {name: [e.acceptance[name].acceptance_length for e in last] for name in (domain, "code")}
        pairs = [(run, reference.get((run.spec.seed, run.spec.steps, run.spec.lr))) for run in runs]
        against = [_final(run, domain) - _final(other, domain) for run, other in pairs if other is not None]
        stale = [run.stale[domain].acceptance_length for run in runs]
        positions = zip(*(e.acceptance[domain].per_position for e in last), strict=True)
        print(
            f"{spec.label:28s} {spec.lr:7g} {spec.steps:5d} {len(runs):5d} {_spread(lengths[domain]):>20s} "
            f"{_spread(against) if against else '-':>22s} {_spread(stale):>20s} {_spread(lengths['code']):>20s} "
            f"{statistics.mean(e.train_s for e in last):7.1f}   "
            + " ".join(f"{statistics.mean(values):.3f}" for values in positions)
        )
        for index, evaluation in enumerate(runs[0].evaluations[:-1]):
            new, code = (
                _spread([run.evaluations[index].acceptance[name].acceptance_length for run in runs])
                for name in (domain, "code")
            )
            print(f"{'':36s} {evaluation.step:5d} {'':5s} {new:>20s} {'':43s} {code:>20s}")


def _final(run: Run, domain: str) -> float:
    return run.evaluations[-1].acceptance[domain].acceptance_length


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="losses compared on recorded trajectories of the demo model")
    parser.add_argument("--domain", choices=NEW_DOMAINS, default="maths", help="that is new; default: maths")
    parser.add_argument("--data", type=Path, required=True, help="folder of recorded answers, made when missing")
    parser.add_argument("--json", type=Path, default=Path("adaptation.json"), help="results; default: adaptation.json")
    parser.add_argument("--record-only", action="store_true", help="record answers and stop")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of a run; default: 200")
    parser.add_argument("--evaluations", type=int, default=2, help="of a run, evenly spaced; default: 2")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--freeze-context", action="store_true", help="leave the drafter's context side alone")
    parser.add_argument("--replay-share", type=float, default=0.0, help="of draws from code answers, in [0, 1]")
    parser.add_argument("--num-train", type=int, default=300, help="answers of the new domain to train on")
    parser.add_argument("--num-heldout", type=int, default=40, help="answers of the new domain to replay")
    parser.add_argument("--num-code", type=int, default=24, help="code answers to replay")
    parser.add_argument("--num-replay", type=int, default=60, help="code answers to mix in")
    parser.add_argument("--max-tokens", type=int, default=80, help="of an answer")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--time-limit", type=float, help="seconds after which nothing new is begun")
    args = parser.parse_args()
    if not 0 <= args.replay_share <= 1:
        parser.error(f"--replay-share {args.replay_share} is invalid: must be in [0, 1]")
    for name in ("steps", "evaluations", "num_train", "num_heldout", "num_code", "num_replay"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is invalid: must be >= 1")
    if args.evaluations > args.steps:
        parser.error(f"--evaluations {args.evaluations} is invalid: must be <= --steps {args.steps}")
    return args


def main() -> None:
    """Record what is missing, run what is missing, and report."""
    args = parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    bench = Bench(args)
    if args.record_only:
        for name in (args.domain, "code", f"{args.domain}_train", "code_train"):
            print(f"{name}: {len(bench.answers[name])} answers")
        return
    setup = {
        "domain": args.domain,
        **bench.answers.sizes._asdict(),
        "target": bench.answers.digest,
        "evaluations": args.evaluations,
    }
    results = Results(args.json, setup)
    if results.before is None:
        results.before = Evaluation(0, 0.0, bench.evaluate(bench.shipped))
        results.save()
    for seed in args.seeds:
        for variant in args.variants:
            spec = RunSpec(
                variant, seed, args.steps, args.lr, args.freeze_context, args.replay_share, args.warmup_steps
            )
            if spec in [run.spec for run in results.runs]:
                continue
            bench.deadline.check()
            run = bench.run(spec)
            results.runs.append(run)
            results.save()
            length, train_s = _final(run, args.domain), run.evaluations[-1].train_s
            print(f"{spec.label} seed {seed}: {args.domain} {length:.3f}, {train_s:.1f} s", flush=True)
    print_summary(results, args.domain)


if __name__ == "__main__":
    main()
