# SPDX-License-Identifier: Apache-2.0
"""Attention inside a graph gets new host lists through its task group, in the order its ExternalEvent keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

npu = torch.ops.npu


class Decoder:
    """One captured attention over a paged cache with lengths that change, and a product after it."""

    def __init__(self, groups: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        self.query = torch.randn(2, 4, 128, generator=generator).bfloat16().to("npu")
        self.cache = torch.randn(2, 4, 128, 2 * 128, generator=generator).bfloat16().to("npu")
        self.table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device="npu")
        self.out = [[torch.empty_like(self.query), torch.empty(1, device="npu")] for _ in range(groups)]
        self.update_stream = torch.npu.Stream()
        self.workspace = npu._npu_fused_infer_attention_score_get_max_workspace(*self.tensors, **self.lists([1, 1]))
        self.graph = torch.npu.NPUGraph()
        self.events: list[Any] = []
        self.handles: list[Any] = []
        with torch.npu.graph(self.graph):
            stream = torch.npu.current_stream()
            for out in self.out:
                event = torch.npu.ExternalEvent()
                event.wait(stream)
                event.reset(stream)
                torch.npu.graph_task_group_begin(stream)
                self.attend([1, 1], out)
                self.handles.append(torch.npu.graph_task_group_end(stream))
                self.events.append(event)
            self.doubled = self.out[-1][0] * 2

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.cache[0], self.cache[1]

    def lists(self, kv: list[int]) -> dict[str, Any]:
        return {
            "actual_seq_lengths": [1, 2],
            "actual_seq_lengths_kv": kv,
            "block_table": self.table,
            "num_heads": 4,
            "num_key_value_heads": 2,
            "scale": 0.1,
            "input_layout": "TND",
            "block_size": 128,
        }

    def attend(self, kv: list[int], out: list[Tensor]) -> None:
        npu.npu_fused_infer_attention_score.out(*self.tensors, **self.lists(kv), workspace=self.workspace, out=out)

    def update(self, kv: list[int], record: bool = True) -> None:
        with torch.npu.stream(self.update_stream):
            for handle, event, out in zip(self.handles, self.events, self.out, strict=True):
                torch.npu.graph_task_update_begin(self.update_stream, handle)
                self.attend(kv, out)
                torch.npu.graph_task_update_end(self.update_stream)
                if record:
                    event.record(self.update_stream)

    def expected(self, kv: list[int]) -> Tensor:
        return npu.npu_fused_infer_attention_score(*self.tensors, **self.lists(kv))[0].cpu() * 2


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("update_first", [True, False])
def test_replay_uses_the_updated_lengths(groups, update_first):
    decoder = Decoder(groups)
    for kv in ([3, 130], [256, 7]):
        if update_first:
            decoder.update(kv)
            decoder.graph.replay()
        else:
            decoder.graph.replay()
            decoder.update(kv)
        torch.npu.synchronize()
        assert torch.equal(decoder.doubled.cpu(), decoder.expected(kv))


def test_what_follows_a_waiting_replay_runs_after_it():
    decoder = Decoder()
    decoder.graph.replay()
    later = decoder.doubled.float().sum() + 1
    decoder.update([5, 6])
    assert later.item() == pytest.approx(decoder.expected([5, 6]).float().sum().item() + 1, rel=1e-6)


def test_replay_without_a_recorded_event_is_an_error_at_the_next_wait(monkeypatch):
    monkeypatch.setenv("NPU_EMULATOR_TIMEOUT_MS", "50")
    decoder = Decoder()
    decoder.update([5, 6])
    decoder.graph.replay()
    torch.npu.synchronize()
    decoder.graph.replay()
    with pytest.raises(RuntimeError, match="ExternalEvent that was not recorded"):
        torch.npu.synchronize()
    assert decoder.expected([5, 6]).shape == (2, 4, 128), "the stream is usable again"


def test_update_needs_as_many_operators():
    decoder = Decoder()
    with torch.npu.stream(decoder.update_stream):
        torch.npu.graph_task_update_begin(decoder.update_stream, decoder.handles[0])
        with pytest.raises(RuntimeError, match="has 1 operators, its update has 0"):
            torch.npu.graph_task_update_end(decoder.update_stream)
        torch.npu.graph_task_update_begin(decoder.update_stream, decoder.handles[0])
        decoder.attend([1, 1], decoder.out[0])
        with pytest.raises(RuntimeError, match="has 1 operators, its update has more"):
            decoder.attend([1, 1], decoder.out[0])
        torch.npu.graph_task_update_end(decoder.update_stream)


def test_update_needs_the_same_operator():
    decoder = Decoder()
    with torch.npu.stream(decoder.update_stream):
        torch.npu.graph_task_update_begin(decoder.update_stream, decoder.handles[0])
        with pytest.raises(
            RuntimeError, match=r"has npu::npu_fused_infer_attention_score.out where its update has aten"
        ):
            decoder.query + 1
        decoder.attend([1, 1], decoder.out[0])
        torch.npu.graph_task_update_end(decoder.update_stream)


def test_update_checks_the_limits_of_the_operator():
    decoder = Decoder()
    with torch.npu.stream(decoder.update_stream):
        torch.npu.graph_task_update_begin(decoder.update_stream, decoder.handles[0])
        with pytest.raises(RuntimeError, match=r"561002.*room for 256 tokens; got 257"):
            decoder.attend([1, 257], decoder.out[0])
        decoder.attend([1, 1], decoder.out[0])
        torch.npu.graph_task_update_end(decoder.update_stream)


def test_task_group_needs_a_capture():
    with pytest.raises(RuntimeError, match="is not being captured"):
        torch.npu.graph_task_group_begin(torch.npu.Stream())
