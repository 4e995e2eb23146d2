# SPDX-License-Identifier: Apache-2.0
"""What commands show while they work: log lines, load progress and summaries; pretty on a terminal, plain otherwise."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from adaflash.cli.measure import PassResult

logger = logging.getLogger(__name__)

_PLAIN_FORMAT = "time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"


class LoadProgress(Protocol):
    """Called while something loads."""

    def __call__(self, description: str, done: int, total: int) -> None:
        """Take what is loading, the bytes done, and the bytes in all."""


def stderr_console() -> Console:
    """Return a console on stderr, so that stdout stays for results."""
    return Console(stderr=True)


def configure_logging(level: str = "INFO") -> None:
    """Log to stderr: coloured on a terminal, `key=value` lines otherwise."""
    if sys.stderr.isatty():
        handler: logging.Handler = RichHandler(console=stderr_console(), show_path=False)
        logging.basicConfig(level=level, handlers=[handler], format="%(message)s")
    else:
        logging.basicConfig(level=level, format=_PLAIN_FORMAT)


@contextmanager
def load_progress() -> Iterator[LoadProgress]:
    """Yield a callback that shows progress: bars on a terminal, otherwise one log line per thing loaded."""
    console = stderr_console()
    if not console.is_terminal:
        yield _log_when_done
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def update(description: str, done: int, total: int) -> None:
            if description not in tasks:
                tasks[description] = progress.add_task(description, total=total)
            progress.update(tasks[description], completed=done, total=total)

        yield update


def _log_when_done(description: str, done: int, total: int) -> None:
    if done >= total:
        logger.info("loaded what=%r bytes=%s", description, total)


def show_summary(title: str, values: Mapping[str, object]) -> None:
    """Show names and values: a table on a terminal, otherwise one log line."""
    console = stderr_console()
    if not console.is_terminal:
        logger.info("%s %s", title, " ".join(f"{name}={_plain(value)}" for name, value in values.items()))
        return
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in values.items():
        table.add_row(name, str(value))
    console.print(table)


def _plain(value: object) -> str:
    text = str(value)
    return repr(text) if " " in text or not text else text


def show_pass(result: PassResult, console: Console) -> None:
    """Print one line about a finished pass."""
    console.print(
        f"policy={result.policy} concurrency={result.concurrency} tokens={result.num_output_tokens} "
        f"seconds={result.seconds:.2f} tokens_per_s={result.tokens_per_s:.1f}",
        highlight=False,
        style="dim",
    )
