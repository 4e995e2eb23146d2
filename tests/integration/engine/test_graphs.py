# SPDX-License-Identifier: Apache-2.0
"""Captured forwards: whatever their shapes, padding and swaps of weights, the tokens are those of an eager engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.engine.runner import Drafts, Runner
from adaflash.engine.scheduler import ScheduledSequence
from adaflash.ops.graph_shapes import GraphBuckets
from adaflash.request import SamplingParams
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_loader import load_version
from tests.engines import TinySetup, random_prompts, run_all, step_until_done, tiny_engine
from tests.recording_backend import RecordingBackend

PROMPTS = random_prompts(12, 97, 20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=20, ignore_eos=True)
CONFIG = EngineConfig(verify_policy="fixed", max_num_seqs=6, num_kv_blocks=64, max_model_len=64, block_size=8)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def setup(request: pytest.FixtureRequest, tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup(request.param)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> RecordingBackend:
    recording = RecordingBackend()
    monkeypatch.setattr("adaflash.engine.loading.load_backend", lambda device: recording)
    return recording


def tokens_of(engine: Engine, params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in run_all(engine, PROMPTS, params)]


@pytest.mark.parametrize("policy", ["off", "fixed", "confidence", "goodput"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_replays_give_the_tokens_of_eager_forwards(
    setup: TinySetup, backend: RecordingBackend, params: SamplingParams, policy: str
) -> None:
    config = replace(CONFIG, verify_policy=policy)
    eager = tokens_of(tiny_engine(setup, "random", replace(config, enforce_eager=True)), params)
    assert backend.num_captures == 0, "enforce_eager captures nothing"
    assert tokens_of(tiny_engine(setup, "random", config), params) == eager
    assert backend.num_captures >= 1 + (policy == "fixed")
    assert backend.num_replays > 20


def test_rejection_reads_draft_logits_out_of_a_graph(setup: TinySetup, backend: RecordingBackend) -> None:
    config = replace(CONFIG, sampling_coupling="rejection")
    eager = tokens_of(tiny_engine(setup, "random", replace(config, enforce_eager=True)), SAMPLED)
    assert tokens_of(tiny_engine(setup, "random", config), SAMPLED) == eager
    assert backend.num_replays > 20


@pytest.mark.parametrize("num_tokens", [(3,), (4,), (5,), (7, 8, 9), (1, 2, 40)])
def test_every_edge_of_a_bucket(setup: TinySetup, monkeypatch: pytest.MonkeyPatch, num_tokens: tuple[int, ...]) -> None:
    backend = RecordingBackend(GraphBuckets((1, 2, 4, 8), num_tokens, 1, 16))
    monkeypatch.setattr("adaflash.engine.loading.load_backend", lambda device: backend)
    config = replace(CONFIG, verify_policy="confidence", confidence_threshold=0.02)
    eager = tokens_of(tiny_engine(setup, "random", replace(config, enforce_eager=True)), GREEDY)
    assert tokens_of(tiny_engine(setup, "random", config), GREEDY) == eager
    assert backend.num_replays > 0


def test_new_weights_take_the_place_of_old_ones_under_captured_graphs(
    setup: TinySetup, backend: RecordingBackend
) -> None:
    expected = tokens_of(tiny_engine(setup, None, replace(CONFIG, verify_policy="off")), GREEDY)
    engine = tiny_engine(setup, "random", CONFIG)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, GREEDY, str(index))
    addresses: set[int] = set()
    next_version = 1

    def swap(step: int) -> None:
        nonlocal next_version
        drafters = engine.rollout.drafters
        current = drafters.current
        assert isinstance(current, DFlashDrafter)
        addresses.add(current.fc.weight.data_ptr())
        if drafters.draining is not None:
            engine.rollout.retire(drafters.draining)
        if drafters.has_room:
            version = load_version(setup.drafters[("random", "zero")[next_version % 2]], current, next_version)
            version.pack()
            engine.rollout.introduce(version)
            next_version += 1

    tokens: dict[str, list[int]] = {}
    for delta in step_until_done(engine, swap):
        tokens.setdefault(delta.request_id, []).extend(delta.outputs[0].token_ids)
    assert next_version > 8
    assert len(addresses) == 2, "two resident versions, in two places"
    assert [tokens[str(index)] for index in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("num_swaps", [1, 2, 3])
def test_a_captured_drafter_drafts_with_the_weights_that_were_swapped_in(
    setup: TinySetup, backend: RecordingBackend, monkeypatch: pytest.MonkeyPatch, num_swaps: int
) -> None:
    """After some swaps the drafts are those of an engine that started with the last version."""

    def drafts(engine: Engine) -> list[list[list[int]]]:
        runner, seen = engine._runner, []

        def draft(drafting: list[ScheduledSequence], num_drafts: int) -> Drafts:
            result = Runner.draft(runner, drafting, num_drafts)
            seen.append(result.token_ids)
            return result

        monkeypatch.setattr(runner, "draft", draft)
        run_all(engine, PROMPTS[:4], GREEDY)
        return seen

    config = replace(CONFIG, enable_prefix_caching=False)
    names = ["random", "zero", "zero", "random"]  # the third takes the first one's place, the fourth the second one's
    expected = drafts(tiny_engine(setup, names[num_swaps], replace(config, enforce_eager=True)))
    engine = tiny_engine(setup, "random", config)
    result = drafts(engine)
    assert (result == expected) is (names[num_swaps] == "random"), "the versions draft differently"
    for version in range(1, num_swaps + 1):
        current = engine.rollout.drafters.current
        assert isinstance(current, DFlashDrafter)
        drafter = load_version(setup.drafters[names[version]], current, version)
        drafter.pack()
        engine.rollout.introduce(drafter)
        before = backend.num_replays
        result = drafts(engine)
        assert backend.num_replays > before
    assert result == expected
