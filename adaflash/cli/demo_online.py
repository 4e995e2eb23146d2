# SPDX-License-Identifier: Apache-2.0
"""`adaflash demo --online`: the drafter learns a domain from live traffic while it serves, shown as it happens."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from adaflash.cli.online_replay import Acceptance, ReplayedRequest, read_trajectories, replay_session
from adaflash.cli.online_session import (
    NextPrompt,
    ServedRequest,
    SessionConfig,
    SessionRecord,
    Throughput,
    run_session,
)
from adaflash.config import EngineConfig
from adaflash.demo.prompts import DomainPrompt
from adaflash.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WINDOW_S = 30.0
_BAR_WIDTH = 40
_DOMAINS = ("records", "maths", "code")
# With the context left alone faster steps learn as much as slow ones do with it, and forget less (ADR 10).
_TRAINER_FLAGS = ("--lr=1e-3",)
_DRAFTERS = ("online", "frozen", "osd")

OnReplayed = Callable[[int, int], None]


class Window(NamedTuple):
    """Replies that finished in a stretch of time: tokens per second, and tokens per target forward."""

    start_s: float
    tokens_per_s: float
    acceptance_length: float
    newest_version: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `--online`."""
    group = parser.add_argument_group("with --online")
    group.add_argument("--online", action="store_true", help="let the drafter learn another domain while it serves")
    group.add_argument("--minutes", type=float, default=10.0, metavar="N", help="of live traffic (default: 10)")
    group.add_argument("--concurrency", type=int, default=4, metavar="N", help="users (default: 4)")
    group.add_argument(
        "--kinds",
        type=int,
        default=12,
        metavar="N",
        help="kinds of records, at most 12, or of word problems in maths, at most 52: the fewer, the narrower the "
        "domain (default: 12)",
    )
    group.add_argument("--output", metavar="DIR", help="write session.json and session.png here")
    group.add_argument(
        "--switch-to", metavar="DOMAIN", choices=_DOMAINS, help="domain of the second half of the traffic"
    )
    group.add_argument(
        "--replays", type=int, default=150, metavar="N", help="replies replayed with other drafters (default: 150)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the session and show it; 0 when the online drafter ended ahead of the frozen one."""
    from rich.console import Console

    from adaflash.cli.console import configure_logging
    from adaflash.demo.drafter import demo_drafter_dir
    from adaflash.demo.model import demo_model_dir
    from adaflash.training.trainer_config import TrainerConfig

    args.domain = args.domain or _DOMAINS[0]
    _check(args)
    next_prompt = prompts_of(args)
    configure_logging("ERROR")  # a paused trainer is part of the session
    console = Console(stderr=args.json)
    directories = demo_model_dir(), demo_drafter_dir()
    with tempfile.TemporaryDirectory(prefix="adaflash-online-") as folder:
        work = Path(folder)
        config = SessionConfig(
            work, args.minutes, args.concurrency, args.max_tokens, trainer_flags=_TRAINER_FLAGS, device=args.device
        )
        record = asyncio.run(_until_terminated(_watch_session(config, next_prompt, console)))
        num_threads = len(os.sched_getaffinity(0))  # the server had left its own number behind
        trainer = TrainerConfig(device=args.device, num_threads=num_threads, store=str(work / "osd"))
        with _replaying(console) as progress:
            replayed = replay_session(
                record,
                read_trajectories(work / "trainer" / "spool"),
                trainer,
                directories,
                EngineConfig().confidence_threshold,
                config.max_tokens,
                args.replays,
                progress,
            )
    report = _report(record, replayed, args)
    if args.output is not None:
        _write(Path(args.output), report, record, replayed, console)
    if args.json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        _show(record, replayed, console)
    last = last_third(replayed)
    return 0 if last["online"].length > last["frozen"].length else 1


def _check(args: argparse.Namespace) -> None:
    limits = (("minutes", 0.1, 1440), ("concurrency", 1, 64), ("max_tokens", 8, 512), ("replays", 3, 100_000))
    for name, low, high in limits:
        value = getattr(args, name)
        if not low <= value <= high:
            raise ConfigError(f"--{name.replace('_', '-')}={value} is invalid: must be in [{low}, {high}]")
    if args.domain not in _DOMAINS:
        raise ConfigError(f"--domain={args.domain!r} is invalid: must be one of {', '.join(_DOMAINS)} with --online")


def _endless(make: Callable[[int, int], list[DomainPrompt]]) -> Iterator[DomainPrompt]:
    return itertools.chain.from_iterable(make(seed, 500) for seed in itertools.count(1))


def prompts_of(args: argparse.Namespace) -> NextPrompt:
    """Return what gives prompts without end, of the second domain once half of the time is over."""
    from adaflash.demo.records import record_prompts
    from adaflash.demo.traffic import code_prompts, maths_prompts

    makers = {
        "records": lambda seed, count: record_prompts(seed, count, args.kinds),
        "maths": lambda seed, count: maths_prompts(seed, count, args.kinds),
        "code": code_prompts,
    }
    for domain in {args.domain, args.switch_to} - {None}:
        makers[domain](1, 1)  # refuses what there is not
    streams = {domain: _endless(make) for domain, make in makers.items()}

    def next_prompt(now_s: float) -> DomainPrompt:
        has_switched = args.switch_to is not None and now_s > 30 * args.minutes
        return next(streams[args.switch_to if has_switched else args.domain])

    return next_prompt


# ---- while it runs ---------------------------------------------------------------------------------------------


async def _watch_session(config: SessionConfig, next_prompt: NextPrompt, console: Console) -> SessionRecord:
    from rich.live import Live

    if not console.is_terminal:
        shown = [0]

        def log(record: SessionRecord, now: float) -> None:
            complete = int(now // _WINDOW_S)
            if complete > shown[0]:
                shown[0] = complete
                for window in windows(record.requests, now)[complete - 1 : complete]:
                    console.print(_line(window), highlight=False, style="dim")

        return await run_session(config, next_prompt, log)
    with Live(console=console, refresh_per_second=2) as live:
        return await run_session(config, next_prompt, lambda record, now: live.update(_chart(record, now)))


async def _until_terminated(session: Coroutine[None, None, SessionRecord]) -> SessionRecord:
    """Run the session; SIGTERM ends it in order, so that no trainer is left behind."""
    task = asyncio.ensure_future(session)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def windows(requests: list[ServedRequest], end_s: float) -> list[Window]:
    """Return the session in stretches of 30 s; a stretch without replies has zeros."""
    found = []
    for number in range(max(1, int(end_s // _WINDOW_S))):
        start = number * _WINDOW_S
        inside = [r for r in requests if start <= r.finished_s < start + _WINDOW_S]
        rounds = sum(r.num_rounds for r in inside)
        emitted = sum(r.num_emitted_tokens for r in inside)
        found.append(
            Window(
                start,
                sum(r.num_output_tokens for r in inside) / _WINDOW_S,
                emitted / rounds if rounds else 0.0,
                max((max(r.versions, default=0) for r in inside), default=0),
            )
        )
    return found


def _line(window: Window) -> str:
    return (
        f"seconds={window.start_s:.0f} version={window.newest_version} "
        f"acceptance_length={window.acceptance_length:.2f} tokens_per_s={window.tokens_per_s:.1f}"
    )


def _chart(record: SessionRecord, now: float) -> RenderableType:
    from rich.table import Table

    table = Table(title=f"learning from live traffic, {now:.0f} s", title_justify="left")
    for heading in ("from", "version", "tokens per forward", "", "tokens/s"):
        table.add_column(heading)
    rows = windows(record.requests, now)
    best = max([2.0, *(window.acceptance_length for window in rows)])
    for window in rows:
        bar = "█" * round(_BAR_WIDTH * window.acceptance_length / best)
        length = f"{window.acceptance_length:.2f}"
        table.add_row(f"{window.start_s:.0f} s", str(window.newest_version), length, bar, f"{window.tokens_per_s:.1f}")
    return table


# ---- afterwards ------------------------------------------------------------------------------------------------


def last_third(replayed: list[ReplayedRequest]) -> dict[str, Acceptance]:
    """Return the sums over the replies of the last third of the traffic, by drafter."""
    tail = replayed[-max(1, len(replayed) // 3) :]
    return {name: _total(tail, name) for name in _DRAFTERS}


def _speedup(throughput: Throughput) -> float:
    return statistics.median(s / p for s, p in zip(throughput.speculative, throughput.plain, strict=True))


@contextmanager
def _replaying(console: Console) -> Iterator[OnReplayed]:
    from rich.progress import Progress

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replaying with a frozen drafter and with OSD's", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _show(record: SessionRecord, replayed: list[ReplayedRequest], console: Console) -> None:
    from rich.table import Table

    third = max(1, len(replayed) // 3)
    parts = (("first third", replayed[:third]), ("last third", replayed[-third:]))
    table = Table(title="tokens per target forward, same replies", title_justify="left")
    for heading in ("drafter", *(name for name, _ in parts), "accepted per position, last third"):
        table.add_column(heading)
    for name in _DRAFTERS:
        sums = [_total(part, name) for _, part in parts]
        shares = " ".join(f"{share:.2f}" for share in sums[-1].per_position)
        table.add_row(name, *(f"{acceptance.length:.2f}" for acceptance in sums), shares)
    console.print(table)
    for throughput in record.throughput:
        plain, speculative = statistics.median(throughput.plain), statistics.median(throughput.speculative)
        console.print(
            f"trainer {throughput.trainer}: plain {plain:.1f} tokens/s, speculative {speculative:.1f}, "
            f"{_speedup(throughput):.2f}x",
            highlight=False,
        )


def _total(part: list[ReplayedRequest], drafter: str) -> Acceptance:
    return sum((getattr(request, drafter) for request in part), Acceptance())


def _report(record: SessionRecord, replayed: list[ReplayedRequest], args: argparse.Namespace) -> dict[str, object]:
    from adaflash.cli.environment import environment

    last = last_third(replayed)
    return {
        "domain": args.domain,
        "kinds": args.kinds,
        "switch_to": args.switch_to,
        "minutes": args.minutes,
        "concurrency": args.concurrency,
        "max_tokens": args.max_tokens,
        "acceptance_length_last_third": {name: acceptance.length for name, acceptance in last.items()},
        "accepted_per_position_last_third": {name: acceptance.per_position for name, acceptance in last.items()},
        "online_over_frozen": last["online"].length / last["frozen"].length,
        "throughput": [
            {**dataclasses.asdict(throughput), "speedup": _speedup(throughput)} for throughput in record.throughput
        ],
        "versions": [dataclasses.asdict(version) for version in record.versions],
        "requests": [dataclasses.asdict(request) for request in record.requests],
        "replayed": [dataclasses.asdict(request) for request in replayed],
        "environment": environment(),
    }


def _write(
    folder: Path, report: dict[str, object], record: SessionRecord, replayed: list[ReplayedRequest], console: Console
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "session.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    try:
        from adaflash.cli.online_plot import plot_session
    except ImportError as error:
        console.print(f"no chart is written, {error.name} is missing: pip install 'adaflash[demo]'", style="yellow")
        return
    plot_session(folder / "session.png", record, replayed)
