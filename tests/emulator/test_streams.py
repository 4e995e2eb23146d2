# SPDX-License-Identifier: Apache-2.0
"""Streams, events and memory keep their books."""

from __future__ import annotations

import threading
import time

import pytest
import torch


def test_streams_have_identities():
    first, second = torch.npu.Stream(), torch.npu.Stream()
    assert first != second
    assert first.npu_stream != second.npu_stream
    with torch.npu.stream(first):
        assert torch.npu.current_stream() == first
    assert torch.npu.current_stream() != first


def test_event_measures_time_and_knows_when_it_is_reached():
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 20


def test_stream_waits_for_an_event_behind_a_held_stream():
    held, other = torch.npu.Stream(), torch.npu.Stream()
    gate = torch.npu.ExternalEvent()
    x, y = torch.zeros(3, device="npu"), torch.zeros(3, device="npu")
    gate.wait(held)
    with torch.npu.stream(held):
        x.add_(1)
        reached = torch.npu.Event()
        reached.record(held)
    with torch.npu.stream(other):
        other.wait_event(reached)
        y.copy_(x)
        y.mul_(5)
    assert not reached.query()
    assert not held.query()
    gate.record(torch.npu.current_stream())
    other.synchronize()
    assert reached.query()
    assert y.tolist() == [5, 5, 5]


def test_error_of_a_queued_operator_shows_at_the_next_wait():
    held = torch.npu.Stream()
    gate = torch.npu.ExternalEvent()
    gate.wait(held)
    table, indices = torch.zeros(3, 2, device="npu"), torch.tensor([7], device="npu")
    with torch.npu.stream(held):
        torch.nn.functional.embedding(indices, table)
        gate.record(torch.npu.default_stream())
        with pytest.raises(RuntimeError, match="index out of range"):
            held.synchronize()
    held.synchronize()


def test_pageable_copy_waits_for_its_stream(monkeypatch):
    monkeypatch.setenv("NPU_EMULATOR_TIMEOUT_MS", "50")
    held = torch.npu.Stream()
    gate = torch.npu.ExternalEvent()
    gate.wait(held)
    with torch.npu.stream(held), pytest.raises(RuntimeError, match="507046"):
        torch.ones(3).to("npu", non_blocking=True)
    held.synchronize()


def test_two_threads_can_wait_for_one_another():
    held = torch.npu.Stream()
    gate = torch.npu.ExternalEvent()
    x = torch.ones(3, device="npu")
    gate.wait(held)
    with torch.npu.stream(held):
        y = x * 2
    opener = threading.Timer(0.1, lambda: gate.record(torch.npu.default_stream()))
    opener.start()
    held.synchronize()
    opener.join()
    assert y.tolist() == [2, 2, 2]


def test_memory_is_counted_and_runs_out():
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info()
    x = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
    assert 64 << 20 <= free - torch.npu.mem_get_info()[0] <= 68 << 20, "torch_npu rounds a segment up"
    assert torch.npu.memory_allocated() >= 64 << 20
    del x
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info() == (free, total)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + (1 << 20), dtype=torch.uint8, device="npu")


def test_freed_memory_is_reused_by_the_same_stream():
    torch.npu.empty_cache()
    x = torch.empty(1 << 20, device="npu")
    address = x.data_ptr()
    del x
    assert torch.empty(1 << 20, device="npu").data_ptr() == address


def test_device_says_what_it_is():
    assert torch.npu.device_count() == 1
    assert torch.npu.get_device_name(0) == "Ascend910_9391"
