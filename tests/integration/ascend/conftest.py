# SPDX-License-Identifier: Apache-2.0
"""Engines on an emulated NPU that takes fp32, where tokens must be those of the CPU; skipped elsewhere."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from adaflash.engine import loading
from adaflash.ops.backend import Backend
from tests.conftest import TinyModelBuilder
from tests.engines import TinySetup
from tests.tiny_drafters import TinyDrafterBuilder

_FOLDER = Path(__file__).parent
_COMMAND = "python -m npu_emulator run --lift dtype -- python -m pytest tests/integration/ascend"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lifted = "dtype" in os.environ.get("NPU_EMULATOR_LIFT", "").split(",")
    if os.environ.get("NPU_EMULATOR") == "1" and lifted and find_spec("npu_emulator") is not None:
        return
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"no emulated NPU that takes fp32: {_COMMAND}"))


@pytest.fixture(scope="module")
def setup(
    tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: TinyModelBuilder, tiny_drafter: TinyDrafterBuilder
) -> TinySetup:
    """A target and a drafter with heads of 128, which the attention kernel takes."""
    directory = tmp_path_factory.mktemp("heads128")
    shape = {"head_dim": 128, "num_hidden_layers": 2, "vocab_size": 1500}
    model = tiny_qwen3(directory / "target", shape, logit_scale=4.0)
    drafter = tiny_drafter(directory / "random", directory / "target", config={"head_dim": 128}, length_head=True)
    return TinySetup(model, directory / "target", {"random": drafter})


@pytest.fixture
def fp32_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the npu backend hand fp32 to the attention kernel, as the emulator does not mind."""
    load = loading.load_backend

    def load_lifted(device: str) -> Backend:
        backend = load(device)
        return type(backend)(attention_dtypes=_DTYPES) if device == "npu" else backend

    monkeypatch.setattr(loading, "load_backend", load_lifted)
