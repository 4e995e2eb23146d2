# SPDX-License-Identifier: Apache-2.0
"""A backend that captures for real on a CPU: operations are recorded once, and replayed on the same memory.

What a graph does on a device holds here too: results of a replay are where those of the capture were, Python between
the operations does not run again, whatever was read on the host stays as it was. Only attention takes new lengths, as a
device's graph does by its own means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adaflash.ops.backend import Backend
from adaflash.ops.graph_shapes import GraphBuckets
from adaflash.ops.host_batch import StaticBatch
from adaflash.ops.metadata import AttentionMetadata, PackedBatch

Output = TypeVar("Output")

_READS_BY_HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::unique"}


class _Recorder(TorchDispatchMode):
    """Runs operations and remembers those that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _READS_BY_HOST:
            raise RuntimeError(f"{name} reads from the device while a graph is captured")
        outputs = func(*args, **kwargs)
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        results = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
        is_written = any(arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments)
        if is_written or not all(x.untyped_storage().data_ptr() in inputs for x in results):
            self.calls.append(lambda: _run_again(func, args, kwargs, results))
        return outputs


def _run_again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> None:
    again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
    for result, value in zip(results, again, strict=True):
        if value.data_ptr() != result.data_ptr():
            result.copy_(value)


class RecordingBackend(Backend):
    """The reference ops, captured in shapes of few sequences and tokens.

    Attributes:
        num_captures: Captured forwards.
        num_replays: Runs of captured forwards.
    """

    name = "recording"

    def __init__(self, buckets: GraphBuckets | None = None) -> None:
        super().__init__("cpu")
        self.num_captures = self.num_replays = 0
        self._buckets = buckets or GraphBuckets((2, 3, 5, 9), (4, 8, 12, 16, 24, 32, 40), 1, 16)
        self._static: StaticBatch | None = None
        self._recorder: _Recorder | None = None

    def graph_buckets(self, max_num_seqs: int, max_num_tokens: int) -> GraphBuckets | None:
        return self._buckets

    def default_kv_cache_bytes(self, utilization: float) -> int:
        return 2**26

    def capture(self, forward: Callable[[PackedBatch], Output], static: StaticBatch) -> Callable[[], Output]:
        self.num_captures += 1
        recorder = _Recorder()
        self._static, self._recorder = static, recorder
        try:
            with recorder:
                output = forward(static.batch)
        finally:
            self._static = self._recorder = None

        def replay() -> Output:
            self.num_replays += 1
            for call in recorder.calls:
                call()
            return output

        return replay

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        scale: float,
        causal: bool,
        window: int | None = None,
    ) -> Tensor:
        static, recorder = self._static, self._recorder
        if static is None or recorder is None:
            return super().paged_attention(q, k_cache, v_cache, meta, scale, causal, window)
        out = torch.zeros_like(q)

        def attend() -> None:
            now = self.attention_metadata(static.batch)
            out.copy_(super(RecordingBackend, self).paged_attention(q, k_cache, v_cache, now, scale, causal, window))

        recorder.calls.append(attend)
        recorder.__exit__(None, None, None)
        try:
            attend()
        finally:
            recorder.__enter__()
        return out
