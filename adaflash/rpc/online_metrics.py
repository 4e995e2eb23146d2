# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of online learning: trajectories on their way out, versions on their way in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from adaflash.rpc.online import OnlineLearning


class OnlineCollector(Collector):
    """Reads what the parts of online learning count when Prometheus scrapes; keeps no numbers of its own."""

    def __init__(self, online: OnlineLearning) -> None:
        self._online = online

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        yield from self._trajectories()
        yield from self._versions()

    def _trajectories(self) -> Iterator[Metric]:
        spool = self._online.spool
        counters = spool.counters
        yield _gauge("adaflash:trajectory_spool_bytes", "Bytes of trajectories that wait on disk.", spool.num_bytes)
        yield _gauge("adaflash:trajectory_spool_records", "Trajectories that wait on disk.", spool.num_records)
        yield _counter("adaflash:trajectories_captured", "Trajectories written.", counters.num_written)
        dropped = {
            "writer_behind": counters.dropped_full,
            "disk": counters.dropped_disk,
            "spool_full": counters.dropped_bytes,
            "age": counters.dropped_age,
        }
        yield _labelled("adaflash:trajectories_dropped", "Trajectories nobody will read.", "reason", dropped.items())
        uploader = self._online.uploader
        if uploader is not None:
            sent = uploader.status.counters
            outcomes = {
                "accepted": sent.num_accepted,
                "duplicate": sent.num_duplicate,
                "invalid": sent.num_invalid,
                "dropped": sent.num_dropped,
            }
            yield _labelled(
                "adaflash:trajectories_submitted", "Trajectories sent to the trainer.", "result", outcomes.items()
            )

    def _versions(self) -> Iterator[Metric]:
        manager, client = self._online.manager, self._online.versions
        if manager is None or client is None:
            return
        states = GaugeMetricFamily("adaflash:drafter_versions", "Versions of the drafter by state.", labels=["state"])
        for state, version in manager.versions_by_state().items():
            states.add_metric([state], version)
        yield states
        counters = manager.counters
        results = {
            "promoted": counters.num_promoted,
            "rolled_back": counters.num_rolled_back,
            "refused": counters.num_refused,
            "revoked": counters.num_revoked,
        }
        yield _labelled("adaflash:weight_updates", "Versions by what became of them.", "result", results.items())
        yield _gauge("adaflash:weight_update_seconds", "Time the last version took to load and probe.", counters.load_s)
        status = client.status
        is_connected = status.state in ("subscribed", "fetching", "handing_over")
        yield _gauge("adaflash:trainer_connected", "Whether the trainer is there.", is_connected)
        yield _counter("adaflash:weight_bytes", "Bytes of versions received.", status.num_bytes_received)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=value)


def _labelled(name: str, help_text: str, label: str, samples: Iterable[tuple[str, float]]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for label_value, value in samples:
        family.add_metric([label_value], value)
    return family
