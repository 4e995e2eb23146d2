# SPDX-License-Identifier: Apache-2.0
"""Draws simulated speedups over the load, one line per policy."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Point(NamedTuple):
    """Speedup of a policy over plain decoding at a load."""

    policy: str
    load: float
    speedup: float


def plot_speedups(path: Path, title: str, axis: str, points: list[Point]) -> None:
    """Write a picture.

    Args:
        path: Overwritten.
        title: Of the chart.
        axis: What the load is counted in.
        points: At least one.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for policy in dict.fromkeys(point.policy for point in points):
        chosen = sorted((point.load, point.speedup) for point in points if point.policy == policy)
        axes.plot(*zip(*chosen, strict=True), marker="o", markersize=4, label=policy)
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        sorted({point.load for point in points}), labels=[f"{x:g}" for x in sorted({p.load for p in points})]
    )
    axes.set_xlabel(axis)
    axes.set_ylabel("tokens/s over plain decoding")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
