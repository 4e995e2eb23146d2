# SPDX-License-Identifier: Apache-2.0
"""Graphs replay what was captured on the inputs of the moment, and what a device forbids is an error."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

npu = torch.ops.npu


def capture(function: Any, *inputs: Tensor) -> tuple[Any, Any]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = function(*inputs)
    return graph, result


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_capture_runs_nothing_and_replay_runs_all():
    x = torch.ones(4, 4, device="npu")
    before = x.clone()
    graph, (y, total) = capture(lambda x: (F.silu(x @ x.t() + 1).softmax(-1), x.add_(1).sum()), x)
    assert torch.equal(x.cpu(), before.cpu())
    graph.replay()
    expected = F.silu(before.cpu() @ before.cpu().t() + 1).softmax(-1)
    assert torch.equal(y.cpu(), expected)
    assert total.item() == 32


def test_replay_sees_changed_inputs():
    x = random(3, 5).to("npu")
    w = torch.nn.Linear(5, 5).to("npu")
    graph, y = capture(lambda x: w(x).relu(), x)
    for seed in (1, 2):
        x.copy_(random(3, 5, seed=seed))
        with torch.no_grad():
            w.weight.copy_(random(5, 5, seed=seed + 10))
        graph.replay()
        assert torch.equal(y.cpu(), F.linear(x.cpu(), w.weight.cpu(), w.bias.cpu()).relu())


def test_intermediate_memory_is_reused_in_order():
    x = random(64).to("npu")

    def chain(x: Tensor) -> Tensor:
        for step in range(6):
            x = x * 1.5 + step
        return x

    graph, y = capture(chain, x)
    gc.collect()
    noise = [torch.full((64,), 7.0, device="npu") for _ in range(8)]
    graph.replay()
    assert torch.equal(y.cpu(), chain(x.cpu()))
    assert all(bool((n == 7).all()) for n in noise), "the graph wrote into tensors made after its capture"


def test_operators_of_torch_npu_are_captured():
    x, gamma = random(4, 32).bfloat16().to("npu"), torch.ones(32, dtype=torch.bfloat16, device="npu")
    graph, (y, _) = capture(lambda x: npu.npu_rms_norm(npu.npu_swiglu(torch.cat((x, x), -1)), gamma), x)
    graph.replay()
    first = y.clone()
    x.copy_(random(4, 32, seed=5).bfloat16())
    graph.replay()
    wide = npu.npu_rms_norm(npu.npu_swiglu(torch.cat((x, x), -1)), gamma)[0]
    assert torch.equal(y, wide)
    assert not torch.equal(y, first)


def test_views_slices_and_index_writes_are_captured():
    cache = torch.zeros(6, 3, device="npu")
    rows = torch.tensor([4, 1], device="npu")
    values = torch.ones(2, 3, device="npu")
    graph, top = capture(lambda: (cache.index_copy_(0, rows, values), cache[3:].t().sum(0))[1])
    values.copy_(torch.arange(6.0).view(2, 3))
    rows.copy_(torch.tensor([5, 0]))
    graph.replay()
    assert cache[5].tolist() == [0, 1, 2]
    assert cache[0].tolist() == [3, 4, 5]
    assert top.tolist() == [0, 0, 3]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.cpu(),
        lambda x: x.sum().item(),
        lambda x: (x > 0).nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.npu.synchronize(),
        lambda x: torch.npu.current_stream().synchronize(),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x.copy_(torch.ones(3), non_blocking=True),
        lambda x: torch.tensor([1.0, 2.0], device="npu"),
        lambda x: x[torch.tensor([0, 2])],
    ],
    ids=["cpu", "item", "nonzero", "mask", "device", "stream", "pageable", "pageable_async", "new", "host_index"],
)
def test_host_cannot_wait_for_a_captured_stream(wait):
    x = torch.ones(3, device="npu")
    with pytest.raises(RuntimeError, match="107030"):
        capture(wait, x)
    assert (x + 1).tolist() == [2, 2, 2], "the stream is usable after a failed capture"


def test_operators_that_need_no_wait_are_captured():
    x = torch.tensor([3.0, -1.0, 2.0], device="npu")
    rows = torch.tensor([2, 0], device="npu")
    graph, results = capture(
        lambda: (
            x[rows],
            x.masked_fill(x < 0, 0.0),
            x.repeat_interleave(2),
            torch.where(x > 0, x, -x),
            x.sort(descending=True)[0],
            x.topk(2)[1],
            torch.zeros(3, device="npu").index_put((rows,), x[:2]),
        )
    )
    x.copy_(torch.tensor([1.0, -4.0, 5.0]))
    graph.replay()
    assert [result.tolist() for result in results] == [
        [5, 1],
        [1, 0, 5],
        [1, 1, -4, -4, 5, 5],
        [1, 4, 5],
        [5, 1, -4],
        [2, 0],
        [-4, 0, 1],
    ]


def test_pinned_copy_is_captured_and_reads_the_host_at_replay():
    host = torch.ones(3).pin_memory()
    x = torch.zeros(3, device="npu")
    graph, _ = capture(lambda: x.copy_(host, non_blocking=True))
    host.fill_(5)
    graph.replay()
    assert x.tolist() == [5, 5, 5]


def test_replay_after_memory_was_given_back_is_an_error():
    x = torch.ones(1 << 22, device="npu")
    graph, _ = capture(torch.Tensor.relu, x)
    del x
    gc.collect()
    torch.npu.empty_cache()
    with pytest.raises(RuntimeError, match="given back"):
        graph.replay()
    torch.npu.synchronize()


def test_random_operators_differ_from_replay_to_replay():
    x = torch.zeros(8, device="npu")
    graph, _ = capture(lambda: x.uniform_())
    draws = []
    for _ in range(2):
        graph.replay()
        draws.append(x.cpu())
    assert not torch.equal(*draws)


def test_side_stream_joins_the_capture():
    x = torch.ones(4, device="npu")
    side = torch.npu.Stream()

    def forked() -> Tensor:
        main = torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            y = x * 3
        main.wait_stream(side)
        return y + 1

    graph, y = capture(forked)
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [7, 7, 7, 7]
    with torch.npu.stream(side):
        assert (x + 1).tolist() == [3, 3, 3, 3]


def test_other_threads_may_launch_during_a_capture():
    x = torch.ones(4, device="npu")
    results = []
    graph = torch.npu.NPUGraph()

    def work() -> None:
        results.append(x * 2)

    with torch.npu.graph(graph, capture_error_mode="thread_local"):
        y = x + 1
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert results[0].tolist() == [2, 2, 2, 2]
    graph.replay()
    assert y.tolist() == [2, 2, 2, 2]


def test_graph_is_replayed_on_another_stream_and_thread():
    x = torch.ones(4, device="npu")
    graph, y = capture(lambda: x + 1)
    x.fill_(10)

    def work() -> None:
        with torch.npu.stream(torch.npu.Stream()):
            graph.replay()
            torch.npu.current_stream().synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert y.tolist() == [11, 11, 11, 11]


def test_captured_operators_are_no_launches_and_replays_are_counted(trace):
    x = torch.ones(4, device="npu")
    with trace.record() as captured:
        graph, _ = capture(lambda: (x * 2).relu())
    with trace.record() as replayed:
        graph.replay()
        graph.replay()
    assert captured.ops["aten::relu"] == 1
    assert captured.launches == 0
    assert (replayed.replays, replayed.launches, sum(replayed.ops.values())) == (2, 0, 0)
