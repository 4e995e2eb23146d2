# SPDX-License-Identifier: Apache-2.0
"""What the host does in a decoding step on an NPU: waits, copies, kernel launches and graph replays.

Runs the engine on an emulated NPU with a random model (`tests/integration/ascend` makes the same kind), lets all
requests reach decoding and every graph be captured, then records steps one by one. The figures say nothing about time,
but each wait, copy and launch has a price on hardware, and here is how many there are.

Usage: python -m npu_emulator run --lift dtype -- python tools/bench/npu_trace.py --model DIR --draft DIR
       [--policies off fixed goodput] [--concurrency N] [--steps N] [--enforce-eager] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from adaflash.cli.environment import environment
from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.errors import AdaFlashError
from adaflash.request import SamplingParams

POLICIES = ("off", "fixed", "confidence", "goodput")
_PROMPT_TOKENS = 20
_WARM_STEPS = 12


@dataclass(frozen=True)
class StepTrace:
    """Medians over decoding steps, and the most of each.

    Attributes:
        policy: Of the engine.
        syncs: How often the host waits.
        launches: Kernels launched one by one.
        replays: Graphs replayed.
        host_to_device: Copies.
        device_to_host: Copies.
        most_syncs: The largest number of waits of a step.
        num_steps: Steps recorded.
    """

    policy: str
    syncs: float
    launches: float
    replays: float
    host_to_device: float
    device_to_host: float
    most_syncs: int
    num_steps: int


def trace_steps(engine: Engine, policy: str, concurrency: int, num_steps: int) -> StepTrace:
    """Record decoding steps of `concurrency` requests under a policy."""
    from npu_emulator import trace

    engine.set_verify_policy(policy)
    params = SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True)
    names = [engine.add_request([5 + i] * _PROMPT_TOKENS, params) for i in range(concurrency)]
    for _ in range(_WARM_STEPS):
        engine.step()
    recordings = []
    for _ in range(num_steps):
        with trace.record() as recording:
            engine.step()
        recordings.append(recording)
    for name in names:
        engine.abort(name)
    return StepTrace(
        policy,
        statistics.median(r.syncs for r in recordings),
        statistics.median(r.launches for r in recordings),
        statistics.median(r.replays for r in recordings),
        statistics.median(r.host_to_device.count for r in recordings),
        statistics.median(r.device_to_host.count for r in recordings),
        max(r.syncs for r in recordings),
        num_steps,
    )


def show(rows: Sequence[StepTrace]) -> None:
    """Print a table."""
    print("policy      waits (most)  launches  replays  host to device  device to host")
    for row in rows:
        print(
            f"{row.policy:11s} {row.syncs:5.1f} ({row.most_syncs:4d}) {row.launches:9.1f} {row.replays:8.1f} "
            f"{row.host_to_device:15.1f} {row.device_to_host:15.1f}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.concurrency < 1 or args.steps < 1:
        parser.error("--concurrency and --steps must be positive")
    return args


def main() -> None:
    """Trace every policy and print a table."""
    args = _arguments()
    config = EngineConfig(
        model=str(args.model),
        draft=str(args.draft),
        device="npu",
        max_num_seqs=max(8, args.concurrency),
        num_kv_blocks=8 * args.concurrency,
        enforce_eager=args.enforce_eager,
    )
    try:
        rows = [trace_steps(Engine(config), policy, args.concurrency, args.steps) for policy in args.policies]
    except AdaFlashError as error:
        sys.exit(f"error: {error}")
    show(rows)
    if args.json is not None:
        report = {"steps": [asdict(row) for row in rows], "environment": environment()}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
