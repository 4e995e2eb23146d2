# SPDX-License-Identifier: Apache-2.0
"""How far the simulator is from this machine: speedups of policies on the demo model, simulated and measured.

The arms are served in turns (`policies.py`), every step's size and seconds are kept, host time included. Even rounds
give the costs of the simulation: medians by size, sequences and context of the steps of all arms, and a profile of
forwards for sizes that no arm reached. What is compared are the odd rounds: costs fitted to the steps they predict
would say nothing about time. With --hold-out the costs of an arm are fitted without its own steps.

The simulation is given the answers of the very requests that were served, in their order, and as many tokens per turn.
What a policy learned it keeps from one concurrency to the next, as in serving. Two errors make up that of a speedup:

    time       the served steps, priced by the simulation's costs, against the seconds they took
    behaviour  simulated steps against served ones, priced alike: other lengths, other drafts, other prompts beside

`goodput` decides by costs of its own, which its engine profiled and learned; the simulated one knows those of the
simulation. How much of its error that is shows a second line, where it decides by what the served one believed.
Confidences are those of whole blocks; a narrow block's differ a little, which the simulation ignores.

Usage: python tools/bench/validate_simulator.py [--concurrency 1 4 16 32] [--arms off fixed:1 ...] [--seconds S]
       [--domains mixed|code|maths|chat] [--answers FILE.npz] [--hold-out] [--json FILE]
       python tools/bench/validate_simulator.py --replay FILE [--hold-out] [--answers FILE.npz] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from comparison import Cell, compare, show, verdict
from policies import MAX_MODEL_LEN, PHASES, Traffic, add_turn_flags, arm_config, measure
from served import Served
from served_simulation import SimulatedArms
from served_steps import ObservedArm
from step_costs import StepLimits, StepSamples, fit, step_samples
from traffic_answers import TrafficAnswers
from turns import Slice

from adaflash.cli.environment import environment
from adaflash.config import EngineConfig
from adaflash.demo.drafter import demo_drafter_dir
from adaflash.demo.model import demo_model_dir
from adaflash.durable_files import replace_file
from adaflash.errors import AdaFlashError
from adaflash.ops.registry import load_backend
from adaflash.simulate.acceptance import RepeatedAnswers
from adaflash.speculative.cost_model import CostModel
from adaflash.speculative.drafter_config import load_drafter_config

ARMS = ("off", "fixed:1", "fixed:3", "fixed:7", "confidence", "goodput")
SINGLE_PHASE = [name for name, phases in PHASES.items() if len(phases) == 1]
_MIN_ROUNDS = 4
_OF_SERVING = ("arms", "concurrency", "domains", "seed", "seconds", "slice", "warmup")


class Costs(NamedTuple):
    """Fitted costs.

    Attributes:
        arms: Whose steps contributed.
        samples: What the model was fitted to.
    """

    model: CostModel
    arms: list[str]
    samples: StepSamples


def main() -> None:
    """Serve, record answers, simulate and compare."""
    args = _arguments()
    try:
        served = _serve(args) if args.replay is None else _replayed(args)
        traffic = Traffic(args.domains, 0.0, args.seed)
        num_answers = max(steps.num_requests for one in served for steps in one.steps.values()) + max(args.concurrency)
        answers = TrafficAnswers(traffic, args.answers).first(num_answers)
        report = _validate(args, served, answers)
    except AdaFlashError as error:
        sys.exit(f"error: {error}")
    _write(args, report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_turn_flags(parser, ARMS)
    parser.add_argument("--domains", choices=SINGLE_PHASE, default="mixed")
    parser.add_argument("--hold-out", action="store_true", help="fit the costs of an arm without its own steps")
    parser.add_argument("--answers", type=Path, metavar="FILE.npz", help="where answers are kept for the next run")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="compare again what the --json of a run holds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="kept while serving, and complete in the end")
    args = parser.parse_args()
    if "off" not in args.arms or len(set(args.arms)) != len(args.arms):
        parser.error(f"--arms {' '.join(args.arms)}: every arm once, off among them")
    if min(args.concurrency) < 1 or args.seconds <= 0 or args.slice < 0 or args.warmup < 0 or args.seed < 0:
        parser.error("--concurrency and --seconds must be positive, --slice, --warmup and --seed not negative")
    if args.answers is not None and args.answers.suffix != ".npz":
        parser.error(f"--answers {args.answers} is invalid: must end in .npz")
    return args


# ---- serving ---------------------------------------------------------------------------------------------------


def _config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=str(demo_model_dir()),
        draft=str(demo_drafter_dir()),
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max(args.concurrency),
        enable_prefix_caching=False,
    )


def _serve(args: argparse.Namespace) -> list[Served]:
    """Measure all arms at every concurrency; the engines are gone afterwards.

    Raises:
        ConfigError: An engine does not know an arm.
    """
    traffic = Traffic(args.domains, 0.0, args.seed)
    configs = {name: arm_config(name, _config(args)) for name in args.arms}
    arms = [ObservedArm(name, config) for name, config in configs.items()]
    served = []
    for concurrency in args.concurrency:
        rounds = measure(arms, traffic, concurrency, args)
        if len(rounds) < _MIN_ROUNDS:
            sys.exit(f"error: {len(rounds)} rounds at concurrency {concurrency} are too few: give more --seconds")
        steps = {arm.name: arm.steps for arm in arms}
        served.append(Served(concurrency, rounds, steps, arms[0].profile(concurrency)))
        _write(args, _report(args, [], [one.to_json() for one in served]))
        print(f"served concurrency {concurrency}: {len(rounds)} rounds", flush=True)
    return served


def _replayed(args: argparse.Namespace) -> list[Served]:
    """Return what an earlier run served, and take over its arguments; another file ends the program."""
    try:
        report = json.loads(args.replay.read_bytes())
        for name in _OF_SERVING:
            setattr(args, name, report["arguments"][name])
        return [Served.from_json(part) for part in report["concurrencies"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"error: --replay {args.replay} cannot be read as the --json of a run: {error}") from error


# ---- simulation ------------------------------------------------------------------------------------------------


def _validate(args: argparse.Namespace, served: Sequence[Served], answers: RepeatedAnswers) -> dict[str, object]:
    width = load_drafter_config(demo_drafter_dir()).draft_block_size
    max_num_tokens = _config(args).max_num_batched_tokens
    learning = [arm for arm in args.arms if served[0].steps[arm].believed is not None]
    knowing = SimulatedArms(args.arms, answers, width - 1, max_num_tokens)
    believing = SimulatedArms(learning, answers, width - 1, max_num_tokens, believing=True)
    cells: list[Cell] = []
    parts = []
    for one in served:
        costs = _fit(args, one, width)
        models = {arm: costs[arm].model for arm in args.arms}
        simulated = knowing.turns(one.concurrency, one.steps, models)
        found = compare(one.concurrency, one.rounds, simulated, one.steps, models, args.seed)
        simulated_too = {"off": simulated["off"], **believing.turns(one.concurrency, one.steps, models)}
        steps = {arm: one.steps[arm] for arm in simulated_too}
        others = compare(one.concurrency, one.rounds, simulated_too, steps, models, args.seed)
        found += [replace(cell, believing=True) for cell in others if cell.measured.arm != "off"]
        show(found)
        cells += found
        parts.append(_part(one, simulated, costs))
    print(f"\n{verdict(cells)}")
    return _report(args, cells, parts)


def _fit(args: argparse.Namespace, one: Served, width: int) -> dict[str, Costs]:
    """Return every arm's costs, from the steps of even rounds."""
    context = statistics.median(step.num_context for turn in one.steps["off"].turns for step in turn)
    limits = StepLimits(
        one.concurrency,
        width,
        _config(args).max_num_batched_tokens,
        round(context),
        load_backend("cpu").row_multiple,
    )
    even = {arm: [step for turn in steps.turns[::2] for step in turn] for arm, steps in one.steps.items()}

    def fitted(names: list[str]) -> Costs:
        model, samples = fit(step_samples(step for arm in names for step in even[arm]), one.profiled, limits)
        return Costs(model, names, samples)

    if args.hold_out:
        return {held: fitted([arm for arm in args.arms if arm != held]) for held in args.arms}
    return dict.fromkeys(args.arms, fitted(list(args.arms)))


# ---- the file --------------------------------------------------------------------------------------------------


def _part(one: Served, simulated: dict[str, list[Slice]], costs: dict[str, Costs]) -> dict[str, object]:
    """Return everything about one concurrency as JSON values."""
    return {
        **one.to_json(),
        "simulated": {arm: [part._asdict() for part in parts] for arm, parts in simulated.items()},
        "costs": {
            arm: {"arms": cost.arms, "model": cost.model.to_json(), "samples": cost.samples._asdict()}
            for arm, cost in costs.items()
        },
    }


def _report(args: argparse.Namespace, cells: list[Cell], parts: list[dict[str, object]]) -> dict[str, object]:
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    listed = [cell.to_json() for cell in cells]
    return {"cells": listed, "concurrencies": parts, "arguments": arguments, "environment": environment()}


def _write(args: argparse.Namespace, report: dict[str, object]) -> None:
    if args.json is not None:
        replace_file(args.json, (json.dumps(report) + "\n").encode())


if __name__ == "__main__":
    main()
