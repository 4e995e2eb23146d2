# SPDX-License-Identifier: Apache-2.0
"""`python -m npu_emulator`: building, running, and saying what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def emulator(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "npu_emulator", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NPU_EMULATOR")}
    return subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, timeout=150, check=False
    )


def test_concurrent_builds_give_one_folder(tmp_path):
    cache = {"NPU_EMULATOR_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "npu_emulator", "build"]
    processes = [
        subprocess.Popen(command, env={**os.environ, **cache}, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    folders = {process.communicate(timeout=150)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(folders) == 1
    assert [str(path) for path in tmp_path.iterdir()] == list(folders)
    names = {path.name for path in Path(folders.pop()).glob("*.so")}
    assert {"libascendcl.so", "libopapi.so", "libhccl.so"} <= names


def test_missing_tool_is_named_with_its_package(tmp_path):
    result = emulator("build", NPU_EMULATOR_CACHE=str(tmp_path), PATH=str(tmp_path))
    assert result.returncode == 2
    assert "install the package binutils" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "17"], "--devices='17' is invalid: must be an integer in [0, 16]"),
        (["--lift", "speed"], "NPU_EMULATOR_LIFT='speed' is invalid: must be of dtype"),
        (["--memory", "5"], "--memory='5' is invalid"),
    ],
)
def test_wrong_option_is_refused(arguments, message):
    result = emulator("run", *arguments, "--", "true")
    assert result.returncode == 2
    assert message in result.stderr


def test_unknown_command_is_named():
    result = emulator("run", "--", "no-such-program")
    assert result.returncode == 127
    assert "no-such-program" in result.stderr


def test_process_gets_devices_memory_soc_and_its_exit_status():
    program = (
        "import torch, sys; n = torch.npu; n.set_device(1);"
        "print(n.device_count(), n.get_device_name(1), n.mem_get_info()[1], torch.ones(2, device='npu').device);"
        "sys.exit(3)"
    )
    options = ("--devices", "2", "--soc", "Ascend910B1", "--memory", str(1 << 28))
    result = emulator("run", *options, "--", sys.executable, "-c", program)
    assert result.stdout.splitlines()[-1].split() == ["2", "Ascend910B1", str(1 << 28), "npu:1"], result.stderr
    assert result.returncode == 3


def test_lift_allows_fp32_attention_and_nothing_else():
    program = """
import torch
def call(dtype, block_size):
    q = torch.ones(1, 2, 128, dtype=dtype, device="npu")
    cache = torch.ones(1, block_size, 256, dtype=dtype, device="npu")
    table = torch.zeros(1, 1, dtype=torch.int32, device="npu")
    return torch.ops.npu.npu_fused_infer_attention_score(q, cache, cache, block_table=table, actual_seq_lengths=[1],
        actual_seq_lengths_kv=[1], num_heads=2, num_key_value_heads=2, input_layout="TND", block_size=block_size)[0]
assert call(torch.float32, 128).dtype == torch.float32
try:
    call(torch.float32, 64)
except RuntimeError as error:
    print(error)
"""
    result = emulator("run", "--lift", "dtype", "--", sys.executable, "-c", program)
    assert "block_size must be 128" in result.stdout, result.stderr
