# SPDX-License-Identifier: Apache-2.0
"""`adaflash weights`: what versions of the drafter a trainer has, and a hand on which of them the servers use."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import socket
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from adaflash.cli.generate import tls_from
from adaflash.config import ENV_PREFIX, environment_overrides
from adaflash.errors import AdaFlashError, ConfigError, UnavailableError

if TYPE_CHECKING:
    from adaflash.rpc.trainer_client import TrainerClient
    from adaflash.rpc.trainer_convert import TrainerStatus, VersionSummary
    from adaflash.training.version_report import VersionReport

DEFAULT_TIMEOUT_S = 60.0
_REASON = "by hand"
_UNITS = ("B", "KB", "MB", "GB", "TB")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `adaflash weights`."""
    text = "list the versions of the drafter that a trainer has, activate an older one, or roll one back"
    parser = subparsers.add_parser("weights", help=text, description=f"{text.capitalize()}.")
    actions = parser.add_subparsers(
        dest="action",
        metavar="ACTION",
        parser_class=cast("type[argparse.ArgumentParser]", partial(argparse.ArgumentParser, allow_abbrev=False)),
    )
    _add_action(actions, "list", "", "show versions, and what servers last reported")
    text = "publish the weights of an older version again, under a new number"
    activate = _add_action(actions, "activate", "N", text)
    activate.add_argument("version", metavar="N", type=_version, help="the version whose weights are wanted")
    rollback = _add_action(actions, "rollback", "[N]", "mark a version bad: no server uses it again")
    rollback.add_argument("version", metavar="N", type=_version, nargs="?", help="the version; else the active one")


def _add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, arguments: str, text: str
) -> argparse.ArgumentParser:
    # argparse shows optional arguments behind the flags, where it does not understand them.
    usage = f"adaflash weights {name} {arguments} [--trainer HOST:PORT] [FLAG ...]".replace("  ", " ")
    parser = actions.add_parser(name, help=text, description=f"{text.capitalize()}.", usage=usage)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    trainer = parser.add_argument_group("trainer")
    trainer.add_argument("--trainer", metavar="HOST:PORT", help=f"the trainer; else {ENV_PREFIX}TRAINER")
    trainer.add_argument("--api-key", metavar="KEY", help=f"the trainer's token; else {ENV_PREFIX}TRAINER_API_KEY")
    trainer.add_argument("--tls", action="store_true", help="connect with TLS")
    trainer.add_argument("--ssl-ca-certs", metavar="FILE", help="PEM authorities to trust; needs --tls")
    trainer.add_argument("--ssl-certfile", metavar="FILE", help="PEM certificate to present; needs --tls")
    trainer.add_argument("--ssl-keyfile", metavar="FILE", help="PEM key of the certificate; needs --tls")
    trainer.add_argument(
        "--timeout", metavar="S", type=_seconds, default=DEFAULT_TIMEOUT_S, help="seconds a call may take (default: 60)"
    )
    return parser


def _version(text: str) -> int:
    from adaflash.training.manifest import MAX_VERSION

    if not text.isdecimal() or not 0 < int(text) <= MAX_VERSION:
        raise argparse.ArgumentTypeError(f"{text!r} is invalid: must be an integer in [1, {MAX_VERSION}]")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is invalid: must be a number > 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Do what the action says; 0 when it was done."""
    if args.action is None:
        raise ConfigError("an action is needed: list, activate N or rollback [N]")
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from adaflash.rpc.trainer_client import TrainerClient
    from adaflash.rpc.version_client import TrainerAddress

    overrides = environment_overrides(["trainer", "trainer_api_key"])
    address = args.trainer or overrides.get("trainer")
    if address is None:
        raise ConfigError(f"a trainer is needed: give --trainer HOST:PORT, or set {ENV_PREFIX}TRAINER")
    trainer = TrainerAddress(address, args.api_key or overrides.get("trainer_api_key"), tls_from(args))
    async with TrainerClient(trainer, timeout_s=args.timeout) as client:
        try:
            await {"list": _list, "activate": _activate, "rollback": _rollback}[args.action](client, args)
        except UnavailableError as error:
            raise UnavailableError(f"the trainer at {address} cannot be reached: {error}") from error
    return 0


async def _list(client: TrainerClient, args: argparse.Namespace) -> None:
    status = await client.status()
    if args.json:
        print(json.dumps(dataclasses.asdict(status)))
    else:
        print_status(status)


async def _activate(client: TrainerClient, args: argparse.Namespace) -> None:
    version = await client.activate(args.version)
    if args.json:
        print(json.dumps({"version": version, "base_version": args.version}))
    else:
        print(f"version {args.version} is published again as {version}")


async def _rollback(client: TrainerClient, args: argparse.Namespace) -> None:
    from adaflash.training.version_report import VersionReport

    before = await client.status()
    version = args.version or before.active_version
    if not version:
        raise AdaFlashError("no version is active, so none can be rolled back: give its number")
    marked = {known.version: known.bad_reason for known in before.versions}
    if marked.get(version) is not None:
        raise AdaFlashError(f"version {version} was marked bad before: {marked[version]}")
    await client.report(VersionReport(version, "bad", reason=_REASON), f"operator@{socket.gethostname()}")
    after = await client.status()
    if args.json:
        print(json.dumps({"version": version, "newest_version": after.newest_version}))
    else:
        newest = f"the newest good one is {after.newest_version}" if after.newest_version else "there is no other"
        print(f"version {version} is marked bad {_REASON}; {newest}")


def print_status(status: TrainerStatus) -> None:
    """Print a status for a reader."""
    print(f"adaflash {status.package_version}, target {status.target_digest}, {status.num_subscribers} servers")
    counts = status.trajectories
    print(
        f"trajectories: {counts.num_accepted} accepted, {counts.num_duplicate} duplicate, "
        f"{counts.num_dropped} dropped, {counts.num_invalid} invalid"
        + (f" (first: {counts.first_invalid})" if counts.first_invalid else "")
    )
    for name, fault in status.damaged.items():
        print(f"DAMAGED {name}: {fault}")
    rows = [_version_row(version, status) for version in status.versions]
    _print_table(("version", "step", "base", "size", "created", "state"), rows, "no versions")
    servers = [_server_row(name, report) for name, report in status.servers.items()]
    _print_table(("server", "version", "event", "acceptance", "rounds", "reason"), servers, "no reports of servers")
    for version in status.versions:
        if version.metrics:
            figures = ", ".join(f"{name} {value:.4g}" for name, value in version.metrics.items())
            print(f"metrics of {version.version}: {figures}")


def _version_row(version: VersionSummary, status: TrainerStatus) -> tuple[str, ...]:
    state = state_of(version, status)
    if not version.is_stored:
        return (str(version.version), "-", "-", "-", "-", state)
    base = "-" if version.base_version is None else str(version.base_version)
    size = f"{format_size(version.num_bytes)} {version.kind}"
    return (str(version.version), str(version.train_step), base, size, version.created_at, state)


def state_of(version: VersionSummary, status: TrainerStatus) -> str:
    """Return what a version is to its trainer, in words."""
    roles = {
        "newest": status.newest_version,
        "active": status.active_version,
        "last good": status.last_good_version,
        **{name: pinned for name, pinned in status.pins.items() if name not in ("active", "last_good")},
    }
    words = [name for name, number in roles.items() if number == version.version]
    if version.bad_reason is not None:
        words.append(f"BAD ({version.bad_reason})")
    return ", ".join(words) or "good"


def format_size(num_bytes: int) -> str:
    """Return a size for a reader, e.g. `1.5 MB`."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}" if unit else f"{num_bytes} B"


def _server_row(name: str, report: VersionReport) -> tuple[str, ...]:
    acceptance = f"{report.acceptance_length:.2f}" if report.num_rounds or report.acceptance_length else "-"
    rounds = str(report.num_rounds) if report.num_rounds else "-"
    return (name, str(report.version), report.event, acceptance, rounds, report.reason)


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], without: str) -> None:
    """Print rows below headings, in columns as wide as they need; control characters are escaped."""
    if not rows:
        print(without)
        return
    # Names and reasons come from other machines.
    lines = [[_printable(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
