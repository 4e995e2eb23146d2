# SPDX-License-Identifier: Apache-2.0
"""`adaflash simulate`: verify policies x loads on a device and a model that need not be here."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from adaflash.cli.json_report import write_json
from adaflash.errors import ConfigError
from adaflash.simulate.acceptance import Answers, read_answers
from adaflash.simulate.catalog import Model, device_sources, load_device, load_model
from adaflash.simulate.costs import SimulatedCosts, read_profile
from adaflash.simulate.policies import make_policy
from adaflash.simulate.roofline import RooflineCosts
from adaflash.simulate.simulation import Load, Simulation
from adaflash.simulate.synthetic import Assumptions, SyntheticAnswers
from adaflash.simulate.tally import Outcome

if TYPE_CHECKING:
    from rich.console import Console

REFERENCE_POLICY = "off"
DEFAULT_POLICIES = ("fixed", "confidence", "length_head:1.3", "goodput", "oracle")
DEFAULT_CONTEXT = 512


class Result(NamedTuple):
    """A policy under a load.

    Attributes:
        concurrency: Users, or None.
        request_rate: Requests per second, or None.
        speedup: Tokens/s over those of `off` under the same load.
    """

    concurrency: int | None
    request_rate: float | None
    speedup: float
    outcome: Outcome


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `adaflash simulate`."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate verify policies on a device that need not be here",
        description="Simulate serving with block-diffusion speculation: what verify policies would do on a device and "
        "a model, from their sizes or a measured profile. Speedups are against plain decoding under the same load. "
        "docs/simulate.md says what is modelled, and where the numbers come from.",
    )
    add = parser.add_argument
    add("--target-device", default="H200", metavar="NAME", help="a device of the built-in list (default: H200)")
    add("--model", default="Qwen3-8B", metavar="NAME", help="a model of the built-in list (default: Qwen3-8B)")
    add("--profile", type=Path, metavar="FILE", help="JSON of measured step times, instead of the device's roofline")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", nargs="+", type=int, metavar="N", help="users at a time (default: 1 32 64 128)")
    load.add_argument("--request-rate", nargs="+", type=float, metavar="R", help="Poisson arrivals per second, instead")
    add("--policy", nargs="+", metavar="P", help=f"default: {' '.join(DEFAULT_POLICIES)}; off is always there")
    acceptance = parser.add_mutually_exclusive_group()
    acceptance.add_argument("--acceptance-length", type=float, metavar="X", help="tokens per round if all is verified")
    acceptance.add_argument("--traces", type=Path, metavar="FILE", help="recorded by tools/bench/record_traces.py")
    add("--context", type=int, metavar="N", help=f"prompt tokens (default: {DEFAULT_CONTEXT}; with --traces: theirs)")
    add(
        "--output-tokens", type=int, metavar="N", help="per request (default: 256; with --traces: theirs, or at most N)"
    )
    add("--num-requests", type=int, metavar="N", help="per load (default: 4 per user, at least 32)")
    add("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="rows of a target step (default: 8192)")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="sequences of a step (default: 256)")
    add("--seed", type=int, default=0, help="of everything drawn (default: 0)")
    add("--json", metavar="FILE", help="write the result as JSON; - is stdout")
    add("--png", type=Path, metavar="FILE", help="draw the speedups; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Run the simulations and show them."""
    from rich.console import Console

    console = Console(stderr=args.json == "-")
    model, loads = load_model(args.model), _loads(args)
    costs = _costs(args, model)
    requests = [_answers(args, model, load.num_requests) for load in loads]
    policies = _policies(args, requests[0])
    for policy in policies:
        make_policy(policy, model.drafter.draft_block_size, requests[0].has_length_ratio, costs)  # Fails now.
    _warn_of_memory(args, model, requests[0], loads)
    results: list[Result] = []
    with console.status("simulating") as status:
        for load, answers in zip(loads, requests, strict=True):
            outcomes: list[Outcome] = []
            for policy in policies:
                status.update(f"simulating {policy}, {_load_name(load)}")
                fresh = make_policy(policy, model.drafter.draft_block_size, answers.has_length_ratio, costs)
                outcomes.append(Simulation(load, answers, costs, fresh, model.drafter.num_drafts).run())
            results += [
                Result(load.concurrency, load.request_rate, one.tokens_per_s / outcomes[0].tokens_per_s, one)
                for one in outcomes
            ]
    _show_table(_title(args), results, console)
    if args.json is not None:
        _write_report(args, loads, results)
    if args.png is not None:
        _draw(args, results, console)
    return 0


def _policies(args: argparse.Namespace, answers: Answers) -> list[str]:
    chosen = args.policy
    if chosen is None:
        has_head = answers.has_length_ratio
        chosen = [name for name in DEFAULT_POLICIES if has_head or not name.startswith("length_head")]
    return [REFERENCE_POLICY, *(name for name in dict.fromkeys(chosen) if name != REFERENCE_POLICY)]


def _costs(args: argparse.Namespace, model: Model) -> SimulatedCosts:
    if args.profile is None:
        return RooflineCosts(load_device(args.target_device), model)
    return read_profile(args.profile, args.max_num_batched_tokens, args.max_num_seqs * model.drafter.draft_block_size)


def _loads(args: argparse.Namespace) -> list[Load]:
    limit = args.output_tokens if args.traces is not None else None
    base = Load(
        32 if args.num_requests is None else args.num_requests,
        request_rate=1.0,
        max_output_tokens=limit,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        seed=args.seed,
    )
    if args.request_rate is not None:
        return [dataclasses.replace(base, request_rate=rate) for rate in args.request_rate]
    return [
        dataclasses.replace(
            base,
            num_requests=max(32, 4 * users) if args.num_requests is None else args.num_requests,
            concurrency=users,
            request_rate=None,
        )
        for users in args.concurrency or [1, 32, 64, 128]
    ]


def _answers(args: argparse.Namespace, model: Model, num_requests: int) -> Answers:
    if args.traces is None and args.acceptance_length is None:
        raise ConfigError("give --acceptance-length X or --traces FILE: how good the drafts are")
    num_drafts = model.drafter.num_drafts
    for name, minimum in (("context", 1), ("output_tokens", 2), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')}={value} is invalid: must be >= {minimum}")
    if args.traces is not None:
        return read_answers(args.traces, num_drafts, args.context)
    context = DEFAULT_CONTEXT if args.context is None else args.context
    output_tokens = 256 if args.output_tokens is None else args.output_tokens
    return SyntheticAnswers(args.acceptance_length, num_drafts, num_requests, context, output_tokens, args.seed)


def _warn_of_memory(args: argparse.Namespace, model: Model, answers: Answers, loads: list[Load]) -> None:
    """Say so where weights and KV would not fit: the simulation has memory for everything."""
    if args.profile is not None:
        return
    device, first = load_device(args.target_device), answers[0]
    for load in loads:
        if load.concurrency is None:
            continue
        num_kv_tokens = min(load.concurrency, load.max_num_seqs) * (first.num_prompt_tokens + first.num_tokens)
        needed = model.num_values(num_kv_tokens) * device.value_bytes
        if needed > device.memory_bytes:
            print(
                f"adaflash: note: {load.concurrency} users need about {needed / 1e9:.0f} GB of "
                f"{device.memory_bytes / 1e9:.0f} GB; the simulation does not preempt",
                file=sys.stderr,
            )


def _load_name(load: Load) -> str:
    return f"{load.concurrency} users" if load.concurrency is not None else f"{load.request_rate:g} requests/s"


def _title(args: argparse.Namespace) -> str:
    where = args.target_device if args.profile is None else f"profile {args.profile.name}"
    what = f"acceptance length {args.acceptance_length:g}" if args.traces is None else f"traces {args.traces.name}"
    return f"simulated: {args.model} on {where}, {what}"


def _show_table(title: str, results: list[Result], console: Console) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("load", "policy", "tok/s", "speedup", "tok/fwd", "ver/tok", "step ms", "plain", "p50 ms", "p99 ms"):
        table.add_column(heading, overflow="fold", justify="left" if heading == "policy" else "right")
    for concurrency, rate, speedup, one in results:
        table.add_row(
            f"{rate:g}/s" if concurrency is None else str(concurrency),
            one.policy,
            f"{one.tokens_per_s:.0f}" if one.tokens_per_s >= 100 else f"{one.tokens_per_s:.1f}",
            f"{speedup:.2f}",
            f"{one.acceptance_length:.2f}",
            f"{one.verified_per_token:.2f}",
            f"{one.mean_step_s * 1000:.1f}",
            f"{one.plain_share:.0%}",
            f"{one.inter_token_p50_s * 1000:.1f}",
            f"{one.inter_token_p99_s * 1000:.1f}",
        )
    console.print(table)


def _write_report(args: argparse.Namespace, loads: list[Load], results: list[Result]) -> None:
    is_roofline, is_made_up = args.profile is None, args.traces is None
    report = {
        "simulated": True,
        "device": dataclasses.asdict(load_device(args.target_device)) if is_roofline else None,
        "device_sources": device_sources(args.target_device) if is_roofline else None,
        "profile": None if is_roofline else str(args.profile),
        "model": dataclasses.asdict(load_model(args.model)),
        "acceptance_length": args.acceptance_length,
        "assumptions": dataclasses.asdict(Assumptions()) if is_made_up else None,
        "traces": None if is_made_up else str(args.traces),
        "loads": [dataclasses.asdict(load) for load in loads],
        "reference_policy": REFERENCE_POLICY,
        "results": [{**result._asdict(), "outcome": dataclasses.asdict(result.outcome)} for result in results],
    }
    write_json(report, args.json)


def _draw(args: argparse.Namespace, results: list[Result], console: Console) -> None:
    try:
        from adaflash.cli.simulate_plot import Point, plot_speedups
    except ImportError as error:
        console.print(f"no chart is drawn, {error.name} is missing: pip install 'adaflash[demo]'", style="yellow")
        return
    points = [
        Point(result.outcome.policy, float(result.concurrency or result.request_rate or 0), result.speedup)
        for result in results
    ]
    axis = "users at a time" if args.request_rate is None else "requests per second"
    try:
        plot_speedups(args.png, _title(args), axis, points)
    except (OSError, ValueError) as error:  # ValueError: a suffix that is no picture format.
        raise ConfigError(f"--png={str(args.png)!r} cannot be written: {error}") from error
