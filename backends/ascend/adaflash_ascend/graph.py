# SPDX-License-Identifier: Apache-2.0
"""Captures forwards as NPUGraphs, and gives the attention calls inside them new lengths for every replay.

The attention operator takes lengths from the host, so a graph holds those of its capture. Each call is captured as a
task group behind an event that it waits for; a replay starts the graph, then issues the same calls with the new lengths
on a second stream, which replace the captured ones, and records the events. The host waits for nothing.
Source: torch_npu/npu/graphs.py; vllm-ascend, compilation/acl_graph.py, for the order of events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from adaflash.ops.graph_shapes import GraphBuckets
from adaflash.ops.host_batch import StaticBatch
from adaflash.ops.metadata import PackedBatch
from adaflash_ascend.attention import AscendAttentionMetadata, build_metadata, length_arguments
from adaflash_ascend.limits import MAX_DRAFT_WIDTH

Output = TypeVar("Output")

SEQS_STEP = 8
_TOKEN_STEPS = ((64, 8), (256, 16), (1024, 32))  # (up to, step); beyond them steps of 64
_LAST_TOKEN_STEP = 64


def graph_buckets(max_num_seqs: int, max_num_tokens: int) -> GraphBuckets:
    """Return the shapes to capture, each of which has room for a dummy sequence beside those of a step."""
    seqs = [1, 2, 4, *range(SEQS_STEP, max_num_seqs + SEQS_STEP, SEQS_STEP)]
    tokens, size, largest = [4], 4, max_num_tokens + max(seqs)
    while size < largest:
        step = next((step for limit, step in _TOKEN_STEPS if size < limit), _LAST_TOKEN_STEP)
        size += step - size % step
        tokens.append(size)
    return GraphBuckets(tuple(1 + size for size in seqs), tuple(tokens), 1, MAX_DRAFT_WIDTH)


@dataclass(frozen=True)
class _AttentionTask:
    """A captured call of the attention operator.

    Attributes:
        handle: Of its task group.
        updated: What the graph waits for before the call.
        arguments: All but the lengths.
        out: Where the result goes.
    """

    handle: object
    updated: Any
    arguments: dict[str, Any]
    out: list[Tensor]


class GraphCapture:
    """Captures forwards, one at a time, all in one memory pool."""

    def __init__(self) -> None:
        self._npu: Any = None
        self._pool: object | None = None
        self._tasks: list[_AttentionTask] | None = None
        self._workspace: Tensor | None = None
        self._updates: Any = None

    @property
    def is_active(self) -> bool:
        """Whether a forward is being captured."""
        return self._tasks is not None

    def capture(self, forward: Callable[[PackedBatch], Output], static: StaticBatch) -> Callable[[], Output]:
        """See `Backend.capture`."""
        if self._npu is None:
            self._npu = torch.get_device_module("npu")
            self._pool, self._updates = self._npu.graph_pool_handle(), self._npu.Stream()
        forward(static.batch)  # what is made on first use is made outside of the graph
        graph = self._npu.NPUGraph()
        with self._recording() as tasks, self._npu.graph(graph, pool=self._pool):
            output = forward(static.batch)

        def replay() -> Output:
            graph.replay()
            self._update(tasks, build_metadata(static.batch))
            return output

        return replay

    def attend(self, meta: AscendAttentionMetadata, arguments: dict[str, Any], out: Tensor) -> Tensor:
        """Capture a call of the attention operator so that `meta`'s lengths can be replaced; returns `out`.

        Args:
            meta: Lengths of the capture.
            arguments: All but the lengths.
            out: [T, Hq, D], made inside the capture.
        """
        assert self._tasks is not None, "a forward is being captured"
        lengths = length_arguments(meta)
        if self._workspace is None:
            self._workspace = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace(**arguments, **lengths)
        outputs = [out, torch.empty(1, dtype=out.dtype, device=out.device)]  # no log-sum-exp is asked for
        arguments = {**arguments, "workspace": self._workspace}
        stream, updated = self._npu.current_stream(), self._npu.ExternalEvent()
        updated.wait(stream)
        updated.reset(stream)
        self._npu.graph_task_group_begin(stream)
        torch.ops.npu.npu_fused_infer_attention_score.out(**arguments, **lengths, out=outputs)
        handle = self._npu.graph_task_group_end(stream)
        self._tasks.append(_AttentionTask(handle, updated, arguments, outputs))
        return out

    @contextmanager
    def _recording(self) -> Iterator[list[_AttentionTask]]:
        tasks: list[_AttentionTask] = []
        self._tasks = tasks
        try:
            yield tasks
        finally:
            self._tasks, self._workspace = None, None

    def _update(self, tasks: list[_AttentionTask], meta: AscendAttentionMetadata) -> None:
        stream, lengths = self._updates, length_arguments(meta)
        with self._npu.stream(stream):
            for task in tasks:
                self._npu.graph_task_update_begin(stream, task.handle)
                torch.ops.npu.npu_fused_infer_attention_score.out(**task.arguments, **lengths, out=task.out)
                self._npu.graph_task_update_end(stream)
                task.updated.record(stream)
