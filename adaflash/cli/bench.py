# SPDX-License-Identifier: Apache-2.0
"""`adaflash bench`: policies x concurrencies over a prompt file, in process or against a running server."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from adaflash.cli.flags import add_flags, flags_of, given_flags, merge_settings
from adaflash.cli.json_report import write_json
from adaflash.cli.measure import BenchRequest, PolicySummary, chat_request, run_interleaved, summarize
from adaflash.config import EngineConfig
from adaflash.errors import ConfigError
from adaflash.request import EngineInfo, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

REFERENCE_POLICY = "off"
# The policy is what is compared, and repeated prompts must pay their prefill every time.
_FIXED_BY_BENCH = ("verify_policy", "enable_prefix_caching")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `adaflash bench`."""
    parser = subparsers.add_parser(
        "bench",
        help="measure throughput and latency",
        description="Measure policies at several concurrencies, interleaved round by round. Speedups are against "
        "policy off in the same round. Without a model the embedded demo model is measured; with --address a running "
        "server, under its own policy. Exit code 1 when greedy tokens differ between policies.",
    )
    parser.add_argument("--policies", default="off,confidence", help="verify policies (default: off,confidence)")
    parser.add_argument("--concurrency", default="1", metavar="N[,N]", help="requests at a time (default: 1)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines with prompt[, domain]")
    parser.add_argument("--domain", help="use the prompts of this domain only")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="use the first N prompts (default: all)")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens per request (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (default: 0, greedy)")
    parser.add_argument("--ignore-eos", action="store_true", help="generate max-tokens tokens for every request")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measured rounds (default: 3)")
    parser.add_argument("--raw-prompts", action="store_true", help="send prompts as plain text, not as a chat")
    parser.add_argument("--address", metavar="HOST:PORT", help="measure this running server instead")
    parser.add_argument("--api-key", help="key of that server")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout")
    add_flags(parser, "engine, when in process", flags_of(EngineConfig, skip=_FIXED_BY_BENCH))


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0 when every policy gave the same tokens."""
    from rich.console import Console

    console = Console(stderr=args.json == "-")
    requests, concurrencies = _requests(args), _integers("--concurrency", args.concurrency)
    if not 1 <= args.rounds <= 1000:
        raise ConfigError(f"--rounds={args.rounds} is invalid: must be in [1, 1000]")
    if args.address is None:
        info, summaries = _bench_engine(args, requests, concurrencies, console)
    else:
        info, summaries = _bench_server(args, requests, concurrencies, console)
    _show_table(summaries, console)
    if args.json is not None:
        _write_report(args, info, len(requests), summaries)
    return 1 if any(summary.identical is False for summary in summaries) else 0


def _requests(args: argparse.Namespace) -> list[BenchRequest]:
    from adaflash.demo.prompts import demo_prompts, read_prompts

    prompts = demo_prompts(args.domain) if args.prompts is None else read_prompts(args.prompts, args.domain)
    if args.num_prompts is not None:
        if not 1 <= args.num_prompts <= len(prompts):
            raise ConfigError(f"--num-prompts={args.num_prompts} is invalid: must be in [1, {len(prompts)}]")
        prompts = prompts[: args.num_prompts]
    requests = []
    for seed, prompt in enumerate(prompts):  # A seed each: a sampled output is then the same in every pass.
        params = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, seed=seed, ignore_eos=args.ignore_eos
        )
        raw = BenchRequest(prompt.prompt, params)
        requests.append(raw if args.raw_prompts else chat_request(prompt.prompt, params))
    return requests


def _bench_engine(
    args: argparse.Namespace, requests: list[BenchRequest], concurrencies: list[int], console: Console
) -> tuple[EngineInfo, list[PolicySummary]]:
    from adaflash.cli.console import load_progress, show_pass
    from adaflash.engine.engine import Engine

    flags = flags_of(EngineConfig, skip=_FIXED_BY_BENCH)
    settings: dict[str, object] = {"max_num_seqs": max(concurrencies)}
    settings |= merge_settings(flags, given_flags(args, flags))
    config = EngineConfig.from_mapping({**settings, "enable_prefix_caching": False, "verify_policy": "auto"})
    if config.max_num_seqs < max(concurrencies):
        raise ConfigError(f"--concurrency {max(concurrencies)} is more than max_num_seqs={config.max_num_seqs}")
    policies = _policies(args.policies)
    with load_progress() as progress:
        engine = Engine(config, progress)
    summaries: list[PolicySummary] = []
    with closing(engine):
        for policy in policies:
            engine.set_verify_policy(policy)  # Fails now, not after an hour, when the drafter cannot do it.
        for concurrency in concurrencies:
            passes = run_interleaved(
                engine, policies, requests, concurrency, args.rounds, lambda result: show_pass(result, console)
            )
            summaries += summarize(passes, REFERENCE_POLICY)
    return engine.info, summaries


def _bench_server(
    args: argparse.Namespace, requests: list[BenchRequest], concurrencies: list[int], console: Console
) -> tuple[EngineInfo, list[PolicySummary]]:
    from adaflash.cli.bench_server import bench_server
    from adaflash.cli.console import show_pass

    given = sorted(given_flags(args, flags_of(EngineConfig, skip=_FIXED_BY_BENCH)))
    if given:
        raise ConfigError(f"--address measures a running server: {', '.join(given)} cannot be set from here")
    info, passes = asyncio.run(
        bench_server(
            args.address, args.api_key, requests, concurrencies, args.rounds, lambda result: show_pass(result, console)
        )
    )
    summaries: list[PolicySummary] = []
    for concurrency in concurrencies:
        summaries += summarize([p for p in passes if p.concurrency == concurrency], REFERENCE_POLICY)
    return info, summaries


def _show_table(summaries: Sequence[PolicySummary], console: Console) -> None:
    from rich.table import Table

    # One space between columns: then the largest figures fit in the 80 columns of a terminal, a pipe or a log.
    table = Table(title="medians (range over rounds)", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("load", "policy", "tok/s", "speedup", "tok/fwd", "verified", "TTFT", "ms/tok", "same"):
        table.add_column(heading, overflow="fold")
    for summary in summaries:
        ratio = summary.speedup
        table.add_row(
            str(summary.concurrency),
            summary.policy,
            f"{summary.tokens_per_s.median:.1f}",
            "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
            f"{summary.acceptance_length:.2f}",
            f"{summary.verified_per_round:.2f}",
            f"{summary.ttft_s.median:.2f}s",
            f"{summary.token_interval_s.median * 1000:.1f}",
            {True: "yes", False: "NO", None: "-"}[summary.identical],
        )
    console.print(table)
    cached = sum(summary.num_cached_tokens for summary in summaries)
    if cached:
        console.print(
            f"{cached} prompt tokens came from the server's prefix cache: TTFT is better than for new prompts"
        )


def _write_report(
    args: argparse.Namespace, info: EngineInfo, num_requests: int, summaries: Sequence[PolicySummary]
) -> None:
    from adaflash.cli.environment import environment

    report = {
        "address": args.address,
        "engine": dataclasses.asdict(info),
        "prompts": str(args.prompts or "embedded"),
        "domain": args.domain,
        "num_requests": num_requests,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "ignore_eos": args.ignore_eos,
        "reference_policy": REFERENCE_POLICY,
        "results": [dataclasses.asdict(summary) for summary in summaries],
        "environment": environment(),
    }
    write_json(report, args.json)


def _policies(text: str) -> list[str]:
    policies = [word.strip() for word in text.split(",") if word.strip()]
    if not policies or len(set(policies)) != len(policies):
        raise ConfigError(f"--policies={text!r} is invalid: must be different policy names, e.g. off,fixed,confidence")
    return policies


def _integers(flag: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{flag}={text!r} is invalid: must be positive integers, e.g. 1,8,32")
    return [int(word) for word in words]
