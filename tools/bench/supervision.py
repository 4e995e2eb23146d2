# SPDX-License-Identifier: Apache-2.0
"""What captured features cost on the way to the trainer, and what they save there, against running the target again.

The demo engine answers its embedded prompts and is captured; the same trajectories are then measured with and
without their features: bytes on the wire and in the spool, and the trainer's seconds in `Supervisor.supervise` and in
`Learner.step`. All figures are per token of a trajectory, its prompt included.

Usage: python tools/bench/supervision.py [--prompts N] [--max-tokens N] [--rounds N] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from adaflash.cli.environment import environment
from adaflash.config import EngineConfig, Supervision
from adaflash.demo.drafter import demo_drafter_dir
from adaflash.demo.model import demo_model_dir
from adaflash.demo.prompts import demo_prompts
from adaflash.engine.capture import CaptureConfig
from adaflash.engine.engine import Engine
from adaflash.models.digest import target_digest
from adaflash.request import ChatMessage, Prompt, SamplingParams
from adaflash.rpc.trainer_convert import trajectory_to_pb
from adaflash.training.spool_segment import record_size
from adaflash.training.trainer_config import TrainerConfig
from adaflash.training.trainer_parts import TrainerParts, load_parts
from adaflash.training.trajectories import Trajectory

KINDS: tuple[Supervision, ...] = ("captured", "recompute")


@dataclass
class Outbox:
    """Keeps the trajectories that an engine captures."""

    trajectories: list[Trajectory] = field(default_factory=list)

    def put(self, trajectory: Trajectory) -> bool:
        """Take one."""
        self.trajectories.append(trajectory)
        return True


@dataclass(frozen=True)
class Cost:
    """One kind of supervision, per token.

    Attributes:
        wire_bytes: Of the message that is uploaded.
        spool_bytes: Of the record on disk, the same at server and trainer.
        supervise_ms: Medians over rounds, of all trajectories together.
        step_ms: The same of the optimizer steps, on blocks of `anchors_per_trajectory` anchors.
    """

    wire_bytes: float
    spool_bytes: float
    supervise_ms: float
    step_ms: float

    @property
    def trainer_ms(self) -> float:
        """Time of a trainer that takes each trajectory once."""
        return self.supervise_ms + self.step_ms


def capture(num_prompts: int, max_tokens: int) -> list[Trajectory]:
    """Return trajectories of the embedded prompts, with features."""
    outbox = Outbox()
    config = EngineConfig(device="cpu", max_model_len=1024, max_num_seqs=4, verify_policy="confidence")
    engine = Engine(config, capture=CaptureConfig(outbox, target_digest(demo_model_dir())))
    prompts: list[Prompt] = [[ChatMessage("user", each.prompt)] for each in demo_prompts()[:num_prompts]]
    engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    engine.close()
    assert all(trajectory.features is not None for trajectory in outbox.trajectories), "every token was computed"
    return outbox.trajectories


def as_kind(trajectories: Sequence[Trajectory], kind: Supervision) -> list[Trajectory]:
    """Return the trajectories as a server with that setting hands them over."""
    if kind == "captured":
        return list(trajectories)
    return [replace(trajectory, features=None) for trajectory in trajectories]


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of one round over all trajectories."""

    supervise_s: float
    step_s: float


def train(parts: TrainerParts, trajectories: Sequence[Trajectory], per_step: int, seed: int) -> RoundTimes:
    """Learn each trajectory once."""
    generator = torch.Generator().manual_seed(seed)
    supervise_s = step_s = 0.0
    for first in range(0, len(trajectories), per_step):
        started = time.perf_counter()
        batch = [parts.supervisor.supervise(one) for one in trajectories[first : first + per_step]]
        supervised = time.perf_counter()
        report = parts.learner.step(batch, generator)
        assert report is not None, "long enough answers have anchors"
        assert report.is_applied, "loss and gradient are finite"
        supervise_s += supervised - started
        step_s += time.perf_counter() - supervised
    return RoundTimes(supervise_s, step_s)


def measure(trajectories: Sequence[Trajectory], num_rounds: int, num_threads: int | None) -> dict[Supervision, Cost]:
    """Measure both kinds in turns."""
    config = TrainerConfig(device="cpu", num_threads=num_threads)
    parts = load_parts(config, demo_model_dir(), demo_drafter_dir())
    inputs = {kind: as_kind(trajectories, kind) for kind in KINDS}
    for kind in KINDS:  # the first step allocates, the first recomputation loads the target
        train(parts, inputs[kind][: config.trajectories_per_step], config.trajectories_per_step, seed=0)
    times: dict[Supervision, list[RoundTimes]] = {kind: [] for kind in KINDS}
    for seed in range(num_rounds):
        for kind in KINDS:
            times[kind].append(train(parts, inputs[kind], config.trajectories_per_step, seed))
    num_tokens = sum(len(trajectory.token_ids) for trajectory in trajectories)
    return {kind: _cost(inputs[kind], times[kind], num_tokens) for kind in KINDS}


def _cost(trajectories: Sequence[Trajectory], times: Sequence[RoundTimes], num_tokens: int) -> Cost:
    wire_bytes = sum(trajectory_to_pb(trajectory).ByteSize() for trajectory in trajectories)
    spool_bytes = sum(record_size(trajectory.to_buffers()) for trajectory in trajectories)
    supervise_s = statistics.median(each.supervise_s for each in times)
    step_s = statistics.median(each.step_s for each in times)
    return Cost(
        wire_bytes / num_tokens, spool_bytes / num_tokens, 1e3 * supervise_s / num_tokens, 1e3 * step_s / num_tokens
    )


def print_costs(costs: dict[Supervision, Cost]) -> None:
    """Print one row per kind."""
    print(f"{'per token':12s} {'wire B':>10s} {'spool B':>10s} {'supervise ms':>14s} {'step ms':>10s} {'both ms':>10s}")
    for kind, cost in costs.items():
        print(
            f"{kind:12s} {cost.wire_bytes:10.1f} {cost.spool_bytes:10.1f} {cost.supervise_ms:14.3f} "
            f"{cost.step_ms:10.3f} {cost.trainer_ms:10.3f}"
        )


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of the trainer; default: torch's")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    trajectories = capture(args.prompts, args.max_tokens)
    num_tokens = sum(len(trajectory.token_ids) for trajectory in trajectories)
    num_prompt = sum(trajectory.num_prompt_tokens for trajectory in trajectories)
    print(f"{len(trajectories)} trajectories, {num_tokens} tokens, {num_prompt} of them prompt")
    costs = measure(trajectories, args.rounds, args.threads)
    print_costs(costs)
    if args.json is not None:
        values = {kind: {**asdict(cost), "trainer_ms": cost.trainer_ms} for kind, cost in costs.items()}
        report = {
            "trajectories": len(trajectories),
            "tokens": num_tokens,
            "prompt_tokens": num_prompt,
            "per_token": values,
            "arguments": {**vars(args), "json": str(args.json)},
            "environment": environment(),
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
