# SPDX-License-Identifier: Apache-2.0
"""The `adaflash` command: finds the subcommand, imports only its module, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, cast

from adaflash import __version__
from adaflash.config import check_environment, suggest
from adaflash.errors import AdaFlashError, ConfigError, RequestError
from adaflash.training.trainer_config import TrainerConfig

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class Command(NamedTuple):
    """A subcommand; its module has `add_parser(subparsers)` and `run(args) -> int`."""

    module: str
    help: str


COMMANDS = {
    "serve": Command("adaflash.cli.serve", "serve a model over gRPC"),
    "generate": Command("adaflash.cli.generate", "generate text from a prompt"),
    "demo": Command("adaflash.cli.demo", "show on the embedded model what speculative decoding does"),
    "trainer": Command("adaflash.cli.trainer", "train a drafter on what servers generate"),
    "train": Command("adaflash.cli.train", "train a drafter on a file of samples"),
    "weights": Command("adaflash.cli.weights", "list, activate and roll back versions of a trainer's drafter"),
    "bench": Command("adaflash.cli.bench", "measure throughput and latency"),
    "simulate": Command("adaflash.cli.simulate", "simulate verify policies on a device that need not be here"),
    "doctor": Command("adaflash.cli.doctor", "report the environment and which backends can run here"),
}


class _Parsers(NamedTuple):
    top: argparse.ArgumentParser
    subparsers: Subparsers


def _build_parsers(chosen: str | None) -> _Parsers:
    """Return the parsers; only the chosen subcommand's module is imported, so that help is quick."""
    parser = argparse.ArgumentParser(
        prog="adaflash", description="Serves large language models losslessly faster.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"adaflash {__version__}")
    subparsers = parser.add_subparsers(
        dest="command",
        metavar="COMMAND",
        required=True,
        parser_class=cast("type[argparse.ArgumentParser]", partial(argparse.ArgumentParser, allow_abbrev=False)),
    )
    for name, command in COMMANDS.items():
        if name == chosen:
            importlib.import_module(command.module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=command.help)
    return _Parsers(parser, subparsers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code: 0 done, 1 failed, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    if chosen is not None and chosen not in COMMANDS:
        return _usage_error(f"unknown command {chosen!r}{suggest(chosen, COMMANDS)}")
    parser, subparsers = _build_parsers(chosen)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        return _usage_error(_describe_unknown(unknown, subparsers.choices[args.command].format_help()))
    try:
        check_environment(further=[field.name for field in dataclasses.fields(TrainerConfig)])
        exit_code: int = importlib.import_module(COMMANDS[args.command].module).run(args)
    except (ConfigError, RequestError) as error:
        return _usage_error(str(error))
    except AdaFlashError as error:
        print(f"adaflash: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return exit_code


def serve_main() -> int:
    """Run `adaflash serve`: the entry point of `adaflash-serve`."""
    return main(["serve", *sys.argv[1:]])


def trainer_main() -> int:
    """Run `adaflash trainer`: the entry point of `adaflash-trainer`."""
    return main(["trainer", *sys.argv[1:]])


def _usage_error(message: str) -> int:
    print(f"adaflash: error: {message}", file=sys.stderr)
    return EXIT_USAGE


def _describe_unknown(unknown: Sequence[str], help_text: str) -> str:
    """Return what was not understood, with the nearest flag of the help text."""
    name = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
    if not name.startswith("-"):
        return f"unexpected argument {name!r}"
    return f"unknown flag {name!r}{suggest(name, re.findall(r'--[a-z][a-z-]*', help_text))}"


if __name__ == "__main__":
    sys.exit(main())
