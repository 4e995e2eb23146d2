# SPDX-License-Identifier: Apache-2.0
"""A tiny loaded target, shared by the drafter's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaflash.models.base import TargetModel
from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend
from tests.conftest import TinyModelBuilder


@pytest.fixture(scope="session")
def backend() -> Backend:
    return Backend("cpu")


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: TinyModelBuilder) -> Path:
    directory = tmp_path_factory.mktemp("target")
    tiny_qwen3(directory)
    return directory


@pytest.fixture(scope="session")
def target(target_dir: Path, backend: Backend) -> TargetModel:
    return load_target(target_dir, backend)
