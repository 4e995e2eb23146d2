# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tests.conftest import TinyModelBuilder
from tests.tiny_drafters import TinyDrafterBuilder
from tests.training_setups import TrainingSetup


@pytest.fixture(scope="session")
def setup(
    tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: TinyModelBuilder, tiny_drafter: TinyDrafterBuilder
) -> TrainingSetup:
    """A tiny target with a drafter that has a length head."""
    directory = tmp_path_factory.mktemp("training")
    tiny_qwen3(directory / "target", logit_scale=4.0)
    drafter = tiny_drafter(directory / "drafter", directory / "target", length_head=True)
    return TrainingSetup(directory / "target", drafter)
