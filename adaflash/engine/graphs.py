# SPDX-License-Identifier: Apache-2.0
"""Runs a forward through captured graphs: fills batches up to a captured shape, captures shapes that come back."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from adaflash.ops.backend import Backend
from adaflash.ops.graph_shapes import GraphBuckets, GraphShape
from adaflash.ops.host_batch import HostBatch, StaticBatch
from adaflash.ops.metadata import PackedBatch
from adaflash.speculative.base import BlockStates, Drafter
from adaflash.speculative.packing import PackEntry, lay_out

logger = logging.getLogger(__name__)

Output = TypeVar("Output")

# A shape that came once may never come again; capturing takes as long as some steps.
_MIN_USES = 2
_MAX_GRAPHS = 256


class TargetRows(NamedTuple):
    """What the target computes: hidden [T, H], taps [T, taps] or None, logits [R, V]."""

    hidden: Tensor
    taps: Tensor | None
    logits: Tensor


@dataclass(frozen=True)
class Ran(Generic[Output]):
    """What ran, without dummies, and what the forward returned, with them."""

    batch: PackedBatch
    output: Output


class DummyBlocks:
    """Blocks of the KV pools that belong to no request: where dummy sequences write.

    Args:
        first: Number of the first one.
        count: How many there are.
        block_size: Slots of a block.
    """

    def __init__(self, first: int, count: int, block_size: int) -> None:
        self.num_slots = count * block_size
        self.table = list(range(first, first + count))

    @staticmethod
    def needed(buckets: GraphBuckets, width: int, block_size: int) -> int:
        """Return how many blocks the dummies of blocks of `width` rows need at most."""
        gaps = [size - smaller - 1 for smaller, size in zip((0, *buckets.num_seqs), buckets.num_seqs, strict=False)]
        return -(-max(max(gaps) * width, buckets.max_dummy_len) // block_size)

    def entries(self, lens: list[int]) -> list[PackEntry]:
        """Return dummy sequences of these lengths, all slots of which are distinct; every row has logits."""
        assert sum(lens) <= self.num_slots, "there are slots for all dummy rows"
        entries, start = [], 0
        for length in lens:
            entries.append(PackEntry([0] * length, start, self.table, length))
            start += length
        return entries


@dataclass(frozen=True)
class GraphSetting:
    """What the graphs of an engine have in common.

    Attributes:
        backend: Captures.
        buckets: Shapes to capture.
        dummies: Where dummy sequences write.
        block_size: Slots of a KV block.
        table_width: Columns of the block tables: those of the longest sequence.
    """

    backend: Backend
    buckets: GraphBuckets
    dummies: DummyBlocks
    block_size: int
    table_width: int


@dataclass(frozen=True)
class _Graph(Generic[Output]):
    """A captured forward: where its input is, and what runs it."""

    static: StaticBatch
    replay: Callable[[], Output]


class GraphedForward(Generic[Output]):
    """One forward over packed batches, as graphs of several shapes.

    Args:
        setting: Where and how.
        forward: Batch to tensors; without effects on the host.
        name: For the log.
    """

    def __init__(self, setting: GraphSetting, forward: Callable[[PackedBatch], Output], name: str) -> None:
        self._setting, self._forward, self._name = setting, forward, name
        self._uses: Counter[GraphShape] = Counter()
        self._graphs: OrderedDict[GraphShape, _Graph[Output]] = OrderedDict()

    @property
    def shapes(self) -> list[GraphShape]:
        """Captured shapes, the one used longest ago first."""
        return list(self._graphs)

    def run(self, entries: list[PackEntry], is_uniform: bool = False) -> Ran[Output]:
        """Run the forward over `entries`, all of whose rows have logits.

        What is returned is overwritten by the next run, and what belongs to dummies follows what belongs to `entries`.

        Args:
            entries: In order.
            is_uniform: All have as many rows, and so must dummies.
        """
        setting, num_rows = self._setting, sum(len(entry.token_ids) for entry in entries)
        assert all(entry.num_logits == len(entry.token_ids) for entry in entries), "every row has logits"
        lens = self._dummy_lens(len(entries), num_rows, len(entries[0].token_ids) if is_uniform else None)
        if lens is None:
            return self._run_eagerly(lay_out(entries, setting.block_size), len(entries))
        batch = lay_out([*entries, *setting.dummies.entries(lens)], setting.block_size, setting.table_width)
        shape = GraphShape(batch.layout.num_seqs, batch.layout.num_tokens)
        graph = self._graphs.get(shape) or self._capture(shape, batch)
        if graph is None:
            return self._run_eagerly(batch, len(entries))
        self._graphs.move_to_end(shape)
        graph.static.load(batch)
        return Ran(graph.static.batch.first(len(entries)), graph.replay())

    def _run_eagerly(self, host: HostBatch, num_seqs: int) -> Ran[Output]:
        batch = host.on(self._setting.backend.device)
        return Ran(batch.first(num_seqs), self._forward(batch))

    def _dummy_lens(self, num_seqs: int, num_rows: int, width: int | None) -> list[int] | None:
        """Return the rows of the dummies that fill a batch up to a shape; None where none fits."""
        buckets = self._setting.buckets
        shape = buckets.fit(num_seqs, num_rows) if width is None else buckets.fit_uniform(num_seqs, width)
        if shape is None or shape.num_tokens - num_rows > self._setting.dummies.num_slots:
            return None
        return buckets.dummy_lens(shape, num_seqs, num_rows) if width is None else [width] * (shape.num_seqs - num_seqs)

    def _capture(self, shape: GraphShape, batch: HostBatch) -> _Graph[Output] | None:
        self._uses[shape] += 1
        if self._uses[shape] < _MIN_USES:
            return None
        if len(self._graphs) == _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        started = time.perf_counter()
        static = StaticBatch(batch, self._setting.backend.device)
        graph = self._graphs[shape] = _Graph(static, self._setting.backend.capture(self._forward, static))
        elapsed = time.perf_counter() - started
        logger.info("captured forward=%s seqs=%d tokens=%d seconds=%.3f", self._name, *shape, elapsed)
        return graph


class ForwardGraphs:
    """The graphs of an engine: the target's, with and without tapped features, and each resident drafter's.

    Args:
        setting: Where and how.
        target: (batch, whether features are tapped) to the target's rows.
        block_states: (drafter, batch) to a drafter's rows.
    """

    def __init__(
        self,
        setting: GraphSetting,
        target: Callable[[PackedBatch, bool], TargetRows],
        block_states: Callable[[Drafter, PackedBatch], BlockStates],
    ) -> None:
        self._setting, self._block_states = setting, block_states
        self._target = {
            taps: GraphedForward(setting, partial(_with_taps, target, taps), f"target taps={taps}")
            for taps in (False, True)
        }
        self._drafters: dict[Drafter, GraphedForward[BlockStates]] = {}

    def run_target(self, entries: list[PackEntry], needs_taps: bool) -> Ran[TargetRows]:
        """Run the target over entries all of whose rows have logits."""
        return self._target[needs_taps].run(entries)

    def run_drafter(self, drafter: Drafter, entries: list[PackEntry]) -> Ran[BlockStates]:
        """Run a drafter over blocks of one width."""
        if drafter not in self._drafters:
            self._drafters[drafter] = GraphedForward(self._setting, partial(self._block_states, drafter), "draft")
        return self._drafters[drafter].run(entries, is_uniform=True)


def _with_taps(target: Callable[[PackedBatch, bool], TargetRows], taps: bool, batch: PackedBatch) -> TargetRows:
    return target(batch, taps)
