# SPDX-License-Identifier: Apache-2.0
"""`adaflash demo`: the embedded model with and without speculation, interleaved: speed, acceptance, same tokens."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from adaflash.cli import demo_online
from adaflash.cli.measure import (
    BenchRequest,
    PassResult,
    PolicySummary,
    Spread,
    chat_request,
    run_interleaved,
    summarize,
)
from adaflash.config import EngineConfig
from adaflash.engine.detokenizer import Detokenizer
from adaflash.engine.tokenizer import Tokenizer
from adaflash.errors import ConfigError
from adaflash.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from adaflash.engine.engine import Engine

_PLAIN, _SPECULATIVE = "off", "confidence"
_DRAFT_STYLE, _BONUS_STYLE = "green", "default"
_MAX_MODEL_LEN = 1024


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `adaflash demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="show on the embedded model what speculative decoding does",
        description="Generate a few prompts with the embedded model, plainly and speculatively in turn, and compare. "
        "Exit code 1 when the tokens differ.",
    )
    parser.add_argument("--num-prompts", type=int, default=4, metavar="N", help="prompts to generate (default: 4)")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens per prompt (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measured rounds (default: 3)")
    parser.add_argument(
        "--domain",
        help="code (what the drafter knows), maths, chat or other (default: code); with --online records, maths or "
        "code (default: records)",
    )
    parser.add_argument("--device", default="auto", help="backend (default: auto)")
    parser.add_argument("--num-threads", type=int, default=None, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    demo_online.add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when speculation gave the same tokens."""
    if args.online:
        return demo_online.run(args)
    from rich.console import Console

    from adaflash.cli.console import load_progress
    from adaflash.engine.engine import Engine

    requests = _requests(args)
    console = Console(stderr=args.json)
    config = EngineConfig(
        device=args.device,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=1,
        enable_prefix_caching=False,  # Or every round after the first would skip its prefill.
        num_threads=args.num_threads,
    )
    with load_progress() as progress:
        engine = Engine(config, progress)
    with closing(engine):
        if console.is_terminal and not args.json:
            _show_generation(engine, requests, console)
        summaries = summarize(_measure(engine, requests, args.rounds, console), _PLAIN)
    if args.json:
        json.dump(_report(engine, args, summaries), sys.stdout, indent=2)
        print()
    else:
        _show_comparison(engine, summaries, console)
    return 0 if all(summary.identical for summary in summaries) else 1


def _requests(args: argparse.Namespace) -> list[BenchRequest]:
    from adaflash.demo.prompts import demo_prompts

    prompts = demo_prompts(args.domain or "code")
    for name, limit in (("num_prompts", len(prompts)), ("max_tokens", _MAX_MODEL_LEN // 2), ("rounds", 1000)):
        value = getattr(args, name)
        if not 1 <= value <= limit:
            raise ConfigError(f"--{name.replace('_', '-')}={value} is invalid: must be in [1, {limit}]")
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    return [chat_request(prompt.prompt, params) for prompt in prompts[: args.num_prompts]]


def _measure(engine: Engine, requests: list[BenchRequest], num_rounds: int, console: Console) -> list[PassResult]:
    from rich.progress import Progress

    from adaflash.cli.console import show_pass, stderr_console

    policies = (_PLAIN, _SPECULATIVE)
    if not console.is_terminal:
        return run_interleaved(
            engine, policies, requests, 1, num_rounds, lambda result: show_pass(result, stderr_console())
        )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring, plain and speculative in turn", total=2 * num_rounds)
        return run_interleaved(engine, policies, requests, 1, num_rounds, lambda result: progress.advance(task))


def _show_generation(engine: Engine, requests: list[BenchRequest], console: Console) -> None:
    """Stream every prompt once, accepted drafts in another colour than the tokens the target decided alone."""
    from adaflash.demo.model import demo_model_dir

    tokenizer = Tokenizer(demo_model_dir())
    engine.set_verify_policy(_SPECULATIVE)
    console.print(f"[{_DRAFT_STYLE}]accepted drafts[/] came free with a forward, the rest is one token per forward\n")
    for request in requests:
        assert isinstance(request.prompt, list), "demo prompts are chats"
        console.print(f"[bold]{getattr(request.prompt[0], 'content', '')}[/]")
        detokenizer = Detokenizer(tokenizer, request.params, [])
        engine.add_request(request.prompt, request.params)
        num_accepted = 0
        while engine.has_unfinished():
            for delta in engine.step():
                num_drafts = delta.speculation.num_accepted_tokens - num_accepted
                num_accepted = delta.speculation.num_accepted_tokens
                _print_delta(delta, num_drafts, detokenizer, console)
        console.print("\n")


def _print_delta(delta: RequestOutput, num_drafts: int, detokenizer: Detokenizer, console: Console) -> None:
    for position, token_id in enumerate(delta.outputs[0].token_ids):
        detokenizer.push(token_id)
        style = _DRAFT_STYLE if position < num_drafts else _BONUS_STYLE
        console.print(detokenizer.take_text(), style=style, end="", markup=False, highlight=False, soft_wrap=True)


def _show_comparison(engine: Engine, summaries: list[PolicySummary], console: Console) -> None:
    from rich.table import Table

    plain, speculative = summaries
    assert speculative.speedup is not None, "plain decoding was measured"
    table = Table(title=f"same process, in turn, {plain.num_rounds} rounds: median (range)", title_justify="left")
    for heading in ("", "plain", "speculative"):
        table.add_column(heading)
    table.add_row("tokens/s", _range(plain.tokens_per_s, 1), _range(speculative.tokens_per_s, 1))
    table.add_row("speedup", "1", _range(speculative.speedup, 2))
    lengths = [f"{summary.acceptance_length:.2f}" for summary in summaries]
    table.add_row("acceptance length (tokens per forward)", *lengths)
    table.add_row("drafts verified per forward", *(f"{summary.verified_per_round:.2f}" for summary in summaries))
    table.add_row("drafts verified / accepted", "-", _counts(speculative))
    console.print(table)
    info = engine.info
    console.print(f"tokens identical: {'yes' if speculative.identical else 'NO'}   device: {info.device} {info.dtype}")
    if not speculative.num_verified_tokens:
        console.print("no draft was verified: speculation was not active", style="yellow")


def _range(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def _counts(summary: PolicySummary) -> str:
    return f"{summary.num_verified_tokens} / {summary.num_accepted_tokens}"


def _report(engine: Engine, args: argparse.Namespace, summaries: list[PolicySummary]) -> dict[str, object]:
    from adaflash.cli.environment import environment

    plain, speculative = summaries
    assert speculative.speedup is not None, "plain decoding was measured"
    return {
        "model": engine.info.model,
        "device": engine.info.device,
        "dtype": engine.info.dtype,
        "domain": args.domain or "code",
        "num_prompts": args.num_prompts,
        "max_tokens": args.max_tokens,
        "plain": dataclasses.asdict(plain),
        "speculative": dataclasses.asdict(speculative),
        "speedup": speculative.speedup.median,
        "tokens_identical": speculative.identical,
        "environment": environment(),
    }
