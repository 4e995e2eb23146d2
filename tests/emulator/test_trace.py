# SPDX-License-Identifier: Apache-2.0
"""The trace counts what a program does on the device, in order."""

from __future__ import annotations

import json
import subprocess
import sys

import torch


def test_operators_copies_and_waits_are_counted(trace):
    host = torch.ones(8)
    with trace.record() as recorded:
        x = host.to("npu")
        y = (x * 2).relu()
        y.sum().item()
        y.cpu()
    assert recorded.ops["aten::mul.Tensor"] + recorded.ops["aten::mul.Scalar"] == 1
    assert recorded.ops["aten::relu"] == 1
    assert recorded.launches == sum(recorded.ops.values())
    assert recorded.host_to_device == trace.Transfers(1, 32)
    assert recorded.device_to_host == trace.Transfers(2, 36)
    assert recorded.syncs == 3
    assert recorded.replays == 0


def test_events_come_in_order(trace):
    x = torch.ones(4, device="npu")
    with trace.record() as recorded:
        (x + 1).cpu()
        x.relu()
    kinds = [event.kind for event in recorded.events]
    assert kinds.index("op") < kinds.index("device_to_host") < len(kinds) - 1
    assert recorded.events[-1] == trace.Event("op", "aten::relu", 0, 0)
    copied = next(event for event in recorded.events if event.kind == "device_to_host")
    assert copied.bytes == 16


def test_recordings_nest_and_do_not_see_the_past(trace):
    x = torch.ones(4, device="npu")
    with trace.record() as outer:
        x.relu()
        with trace.record() as inner:
            x.relu()
        x.relu()
    assert (outer.ops["aten::relu"], inner.ops["aten::relu"]) == (3, 1)
    assert [event.name for event in inner.events] == ["aten::relu"]
    with trace.record() as empty:
        pass
    assert not empty.events
    assert not empty.ops


def test_totals_are_written_at_exit(trace, tmp_path):
    program = "import torch; x = torch.ones(4, device='npu'); x.relu().tolist()"
    file = tmp_path / "trace.json"
    command = [sys.executable, "-m", "npu_emulator", "run", "--trace", str(file), "--", sys.executable, "-c", program]
    subprocess.run(command, check=True, timeout=120)
    written = json.loads(file.read_text())
    assert written["ops"]["aten::relu"] == 1
    assert written["device_to_host"] == {"count": 1, "bytes": 16}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
