# SPDX-License-Identifier: Apache-2.0
"""NPUGraphs on an emulated NPU: the tokens of eager steps, new weights in place, and how often the host waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adaflash.engine.engine import Engine
from adaflash.request import SamplingParams
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_loader import load_version
from tests.engines import TinySetup, random_prompts, run_all
from tests.integration.ascend.test_engine import config_of, greedy, tokens_of

trace = pytest.importorskip(
    "npu_emulator.trace", reason="make test-npu runs these on an emulated NPU", exc_type=ImportError
)

PROMPTS = random_prompts(5, 1500, 60)


@pytest.mark.usefixtures("fp32_attention")
@pytest.mark.parametrize("policy", ["off", "confidence", "goodput"])
def test_graphs_yield_the_tokens_of_eager_steps(policy: str, setup: TinySetup) -> None:
    params = [greedy(12), SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)] * 2 + [greedy(30)]
    config = config_of(setup, "npu", policy)
    with trace.record() as eager:
        expected = run_all(Engine(replace(config, enforce_eager=True)), PROMPTS, params)
    with trace.record() as graphs:
        outputs = run_all(Engine(config), PROMPTS, params)
    assert tokens_of(outputs) == tokens_of(expected)
    assert eager.replays == 0
    assert graphs.replays > 10


@pytest.mark.usefixtures("fp32_attention")
def test_versions_are_swapped_in_place_under_graphs(setup: TinySetup) -> None:
    expected = tokens_of(run_all(Engine(config_of(setup, "cpu", None)), PROMPTS, [greedy(20)] * 5))
    engine = Engine(config_of(setup, "npu", "fixed"))
    addresses = set()
    for version in range(1, 5):
        assert tokens_of(run_all(engine, PROMPTS, [greedy(20)] * 5)) == expected
        served = engine.rollout.drafters.current
        assert isinstance(served, DFlashDrafter)
        addresses.add(served.fc.weight.data_ptr())
        drafter = load_version(setup.drafters["random"], served, version)
        drafter.pack()
        engine.rollout.introduce(drafter)
        assert engine.rollout.drafters.good == version
    assert len(addresses) == 2


@pytest.mark.parametrize(("policy", "num_waits", "num_replays"), [("off", 1, 1), ("fixed", 2, 2)])
def test_a_step_waits_once_for_drafts_and_once_for_tokens(
    policy: str, num_waits: int, num_replays: int, setup: TinySetup
) -> None:
    engine = Engine(config_of(setup, "npu", policy, dtype="auto"))
    for prompt in PROMPTS:
        engine.add_request(prompt, greedy(60))
    for _ in range(20):  # prompts, and every shape for the second time
        engine.step()
    for _ in range(5):
        with trace.record() as step:
            engine.step()
        assert (step.syncs, step.replays, step.device_to_host.count) == (num_waits, num_replays, num_waits)
        assert step.host_to_device.count <= 2 * num_replays, "a batch, and what rows are sampled by"
