# SPDX-License-Identifier: Apache-2.0
"""A trainer's counters for Prometheus, under `adaflash:trainer_`; read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adaflash.training.trainer import TrainerStatus

_COUNTERS = (
    ("steps", "Optimizer steps since the start.", "num_steps"),
    ("tokens", "Labels they were about.", "num_tokens"),
    ("skipped_batches", "Batches that were not finite.", "num_skipped_batches"),
    ("published_versions", "Versions published.", "num_published"),
    ("failed_publications", "Publications that the disk or a check refused.", "num_failed_publications"),
    ("resets", "Times training went on from other weights than its own.", "num_resets"),
    ("damaged_states", "Saved states that could not be read.", "num_damaged_states"),
)
_PREFIX = "adaflash:trainer_"


class TrainerCollector(Collector):
    """Keeps no numbers of its own.

    Args:
        read_status: Returns the trainer's status, from any thread.
    """

    def __init__(self, read_status: Callable[[], TrainerStatus]) -> None:
        self._read_status = read_status

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        status = self._read_status()
        for name, help_text, field in _COUNTERS:
            yield CounterMetricFamily(_PREFIX + name, help_text, getattr(status.counters, field))
        yield CounterMetricFamily(_PREFIX + "trajectories", "Trajectories taken.", status.num_trajectories)
        yield CounterMetricFamily(
            _PREFIX + "recomputed_trajectories", "Trajectories the target was run for.", status.num_recomputed
        )
        skipped = CounterMetricFamily(_PREFIX + "skipped_trajectories", "Trajectories skipped.", labels=["reason"])
        for reason, count in status.skipped.items():
            skipped.add_metric([reason], count)
        yield skipped
        yield GaugeMetricFamily(_PREFIX + "base_version", "Version published or taken over last.", status.base_version)
        yield GaugeMetricFamily(_PREFIX + "train_step", "Optimizer steps over all runs.", status.train_step)
        yield GaugeMetricFamily(_PREFIX + "is_training", "Whether it trains or waits for data.", status.is_training)
        yield GaugeMetricFamily(_PREFIX + "window_tokens", "Tokens in memory to draw from.", status.num_window_tokens)
        figures = GaugeMetricFamily(_PREFIX + "figure", "Figures of the last step.", labels=["name"])
        for name, value in status.last.items():
            figures.add_metric([name], value)
        yield figures
