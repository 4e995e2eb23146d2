# SPDX-License-Identifier: Apache-2.0
"""A drafter that learned one sample by heart drafts all of it while it is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.request import RequestOutput, SamplingParams
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_loader import load_version
from tests.engines import TinySetup
from tests.training_setups import TrainingSetup, open_trainer

PROMPT = [5, 17, 29, 41]
MAX_TOKENS = 42
MAX_STEPS = 600


def generate(engine: Engine) -> RequestOutput:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return engine.generate([PROMPT], [params])[0]


def test_an_overfitted_sample_is_drafted_whole(tmp_path: Path, tiny_setup: Callable[[str], TinySetup]) -> None:
    tiny = tiny_setup("qwen3")
    setup = TrainingSetup(tiny.target, tiny.drafters["random"])
    config = EngineConfig(
        model=str(setup.target), draft=str(setup.drafter), device="cpu", dtype="float32", verify_policy="fixed"
    )
    engine = Engine(config)
    served = engine.rollout.drafters.current
    assert isinstance(served, DFlashDrafter)
    before = generate(engine)
    response = list(before.outputs[0].token_ids)
    assert len(response) == MAX_TOKENS
    assert before.speculation.acceptance_length < 2.0

    running = open_trainer(setup, tmp_path, loss="ce", anchors_per_trajectory=64)
    running.trainer.add(setup.trajectory_of([*PROMPT, *response], len(PROMPT)))
    width = served.draft_block_size
    for _ in range(MAX_STEPS):
        report = running.trainer.step()
        assert report is not None
        if report.acceptance_length == width:
            break
    assert report.acceptance_length == width, "every anchor of the sample drafts its whole block"
    version = running.trainer.publish()
    directory = running.store.get(version).directory
    drafter = load_version(directory, served, version)
    drafter.pack()
    running.close()
    engine.rollout.introduce(drafter)
    engine.reset_prefix_cache()

    after = generate(engine)
    assert list(after.outputs[0].token_ids) == response
    speculation = after.speculation
    assert speculation.drafter_versions == (version,)
    assert speculation.num_accepted_tokens == speculation.num_verified_tokens > 0
    # The first token comes with the prompt; each round emits W tokens, the last one what is left.
    assert speculation.num_rounds == -(-(MAX_TOKENS - 1) // width)
