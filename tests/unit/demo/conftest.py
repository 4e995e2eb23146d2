# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_gguf import TinyGguf, write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyGguf:
    pytest.importorskip("gguf", reason="the extra 'demo' is not installed")
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_gguf: TinyGguf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from adaflash.demo.gguf_convert import convert_llama_gguf

    directory = tmp_path_factory.mktemp("tiny-llama")
    convert_llama_gguf(tiny_gguf.path, directory)
    return directory
