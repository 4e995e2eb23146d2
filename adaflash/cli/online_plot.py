# SPDX-License-Identifier: Apache-2.0
"""Draws a session of online learning: tokens per forward by drafter, and tokens per second, over time."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from adaflash.cli.online_replay import Acceptance, ReplayedRequest
from adaflash.cli.online_session import SessionRecord

_NUM_POINTS = 20
_LABELS = {"online": "online (AdaFlash)", "osd": "online, forward KL (OSD)", "frozen": "frozen drafter"}


def plot_session(path: Path, record: SessionRecord, replayed: list[ReplayedRequest]) -> None:
    """Write a PNG.

    Args:
        path: Overwritten.
        record: Of the session.
        replayed: At least one.
    """
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    lengths, rates = figure.subplots(2, 1, sharex=True)
    size = max(1, len(replayed) // _NUM_POINTS)
    chunks = [replayed[i : i + size] for i in range(0, len(replayed), size)]
    times = [chunk[-1].finished_s for chunk in chunks]
    for name, label in _LABELS.items():
        sums = [sum((getattr(request, name) for request in chunk), Acceptance()) for chunk in chunks]
        lengths.plot(times, [acceptance.length for acceptance in sums], marker="o", markersize=3, label=label)
    lengths.set_ylabel("tokens per target forward")
    lengths.legend()
    finished = [request.finished_s for request in record.requests]
    tokens = [request.num_output_tokens for request in record.requests]
    width = max(finished, default=1.0) / _NUM_POINTS
    per_s = [
        sum(n for n, t in zip(tokens, finished, strict=True) if k * width < t <= (k + 1) * width) / width
        for k in range(_NUM_POINTS)
    ]
    rates.plot([(k + 1) * width for k in range(_NUM_POINTS)], per_s, marker="o", markersize=3)
    rates.set_ylabel("tokens per second, all users")
    rates.set_xlabel("seconds")
    for axes in (lengths, rates):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        for version in record.versions:
            axes.axvline(version.active_s, color="grey", linewidth=0.5, linestyle=":")
    figure.savefig(path, dpi=120)
