# SPDX-License-Identifier: Apache-2.0
"""Trajectories of a running engine: right tokens, rounds and features, whatever happened to the request's blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from adaflash.config import EngineConfig
from adaflash.engine.capture import CaptureConfig
from adaflash.engine.engine import Engine
from adaflash.errors import ConfigError
from adaflash.request import RequestOutput, SamplingParams
from adaflash.training.trajectories import Trajectory
from tests.engines import TinySetup, random_prompts, step_until_done

VOCAB = 97
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True)
CONFIG = EngineConfig(
    verify_policy="fixed", max_num_seqs=8, num_kv_blocks=64, max_model_len=96, block_size=8, dtype="float32"
)
TAPS = (0, 2)  # of the tiny drafters: first and last of three layers


class Sink:
    def __init__(self) -> None:
        self.taken: list[Trajectory] = []

    def put(self, trajectory: Trajectory) -> bool:
        self.taken.append(trajectory)
        return True


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def setup(request: pytest.FixtureRequest, tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup(request.param)


def capturing(setup: TinySetup, config: EngineConfig = CONFIG, **capture: object) -> tuple[Engine, Sink]:
    sink = Sink()
    config = replace(config, model=str(setup.target), draft=str(setup.drafters["random"]), device="cpu")
    return Engine(config, capture=CaptureConfig(sink, "digest", **capture)), sink  # type: ignore[arg-type]


def finish(engine: Engine) -> list[RequestOutput]:
    """Step until idle and until every trajectory has reached the sink; nothing may be left behind."""
    deltas = step_until_done(engine, lambda _: None)
    engine.close()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_total_blocks, "a KV block leaked"
    return deltas


def expected_features(model: PreTrainedModel, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Taps and last hidden states of all tokens but the last, by transformers."""
    with torch.no_grad():
        states = model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
    norm = model.model.norm
    raw: list[torch.Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0]))
    with torch.no_grad():
        model(torch.tensor([token_ids[:-1]]))
    handle.remove()
    outputs = [*states[1:-1], raw[0]]  # transformers gives the last layer's output normed
    taps = torch.cat([outputs[layer] for layer in TAPS], dim=-1)
    return taps[0].numpy(), states[-1][0].numpy()


def assert_features(setup: TinySetup, trajectory: Trajectory) -> None:
    assert trajectory.features is not None
    taps, hidden = expected_features(setup.model, trajectory.token_ids)
    np.testing.assert_allclose(trajectory.features.taps, taps, atol=1e-4)
    np.testing.assert_allclose(trajectory.features.hidden, hidden, atol=1e-4)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"max_num_batched_tokens": 11},  # chunked prefill
        {"num_kv_blocks": 16},  # preemption
        {"verify_policy": "off"},
        {"enable_prefix_caching": False},
    ],
)
def test_features_are_the_targets_whatever_happened(
    setup: TinySetup, change: dict[str, object], params: SamplingParams
) -> None:
    engine, sink = capturing(setup, replace(CONFIG, **change))  # type: ignore[arg-type]
    shared = random_prompts(1, VOCAB, 30, seed=4)[0] * 2
    prompts = [*random_prompts(10, VOCAB, 30), *(shared[:24] + tail for tail in random_prompts(8, VOCAB, 6, seed=1))]
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, params, str(index))
    outputs: dict[str, list[int]] = {}
    stats = {}
    for delta in finish(engine):
        outputs.setdefault(delta.request_id, []).extend(delta.outputs[0].token_ids)
        stats[delta.request_id] = delta.speculation
    if change.get("num_kv_blocks") == 16:
        assert engine.stats().num_preemptions > 0
    assert len(sink.taken) == len(prompts)
    for trajectory in sink.taken:
        prompt = prompts[int(trajectory.request_id)]
        assert trajectory.token_ids == prompt + outputs[trajectory.request_id]
        assert trajectory.num_prompt_tokens == len(prompt)
        assert trajectory.temperature == params.temperature
        counted = stats[trajectory.request_id]
        assert len(trajectory.rounds) == counted.num_rounds
        assert sum(r.num_verified for r in trajectory.rounds) == counted.num_verified_tokens
        assert sum(r.num_accepted for r in trajectory.rounds) == counted.num_accepted_tokens
        assert_features(setup, trajectory)


def test_prefix_cache_hits_have_features(setup: TinySetup) -> None:
    engine, sink = capturing(setup)
    prompt = random_prompts(1, VOCAB, 30, seed=9)[0] + list(range(5, 45))
    for index in range(2):
        engine.add_request(prompt, GREEDY, str(index))
        step_until_done(engine, lambda _: None)
    assert engine.stats().num_cached_tokens > 0
    finish(engine)
    assert_features(setup, sink.taken[1])


def test_samples_of_a_request_are_trajectories_of_their_own(setup: TinySetup) -> None:
    engine, sink = capturing(setup)
    engine.add_request(list(range(5, 26)), replace(SAMPLED, n=3), "r")
    finish(engine)
    assert sorted(t.sample_index for t in sink.taken) == [0, 1, 2]
    assert len({tuple(t.token_ids) for t in sink.taken}) == 3
    for trajectory in sink.taken:
        assert_features(setup, trajectory)


def test_a_request_can_forbid_it_and_takes_its_rows_along(setup: TinySetup) -> None:
    engine, sink = capturing(setup)
    prompt = list(range(5, 45))
    engine.add_request(prompt, replace(GREEDY, allow_training=False), "private")
    step_until_done(engine, lambda _: None)
    engine.add_request([*prompt, 7, 8], GREEDY, "open")
    finish(engine)
    assert engine.stats().num_cached_tokens > 0
    (trajectory,) = sink.taken
    assert trajectory.request_id == "open"
    assert trajectory.features is None, "its prompt was computed by a request that must not be kept"


def test_an_engine_at_rest_holds_no_block(setup: TinySetup) -> None:
    engine, _ = capturing(setup)
    for index in range(3):
        engine.add_request(list(range(5 + index, 30)), GREEDY, str(index))
    step_until_done(engine, lambda _: None)
    engine.rest()
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    engine.close()


def test_recompute_keeps_tokens_only(setup: TinySetup) -> None:
    engine, sink = capturing(setup, supervision="recompute")
    engine.add_request(list(range(5, 20)), GREEDY)
    finish(engine)
    assert sink.taken[0].features is None
    assert len(sink.taken[0].token_ids) == 15 + 20


def test_short_and_failed_samples_are_left_out_and_the_rate_holds(setup: TinySetup) -> None:
    engine, sink = capturing(setup, min_response_tokens=8)
    engine.add_request([5, 6, 7], replace(GREEDY, max_tokens=7), "short")
    engine.add_request([5, 6, 8], GREEDY, "aborted early")
    engine.add_request([5, 6, 9], GREEDY, "aborted late")
    engine.step()
    engine.abort("aborted early")
    while sum(len(s.output._new_token_ids) + s.seq.num_output_tokens for s in engine._samples.values()) < 15:
        engine.step()
    engine.abort("aborted late")
    finish(engine)
    assert [t.request_id for t in sink.taken] == ["aborted late"]
    assert_features(setup, sink.taken[0])
    none, empty = capturing(setup, sampling_rate=0.0)
    none.add_request([5, 6, 7], GREEDY)
    finish(none)
    assert not empty.taken


def test_random_aborts_and_preemptions_leak_no_block(setup: TinySetup) -> None:
    engine, sink = capturing(setup, replace(CONFIG, num_kv_blocks=20))
    rng = random.Random(0)
    prompts = random_prompts(40, VOCAB, 40)
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, replace(SAMPLED, max_tokens=rng.randint(1, 30), n=rng.choice([1, 1, 2])), str(index))

    def act(_: int) -> None:
        if rng.random() < 0.1 and engine._requests:
            engine.abort(rng.choice(list(engine._requests)))

    step_until_done(engine, act)
    finish(engine)
    assert len(sink.taken) > 10
    for trajectory in sink.taken:
        if trajectory.features is not None:
            assert_features(setup, trajectory)


def test_capture_without_a_drafter_is_refused(setup: TinySetup) -> None:
    config = replace(CONFIG, model=str(setup.target), device="cpu", verify_policy="off")
    with pytest.raises(ConfigError, match="give --draft"):
        Engine(config, capture=CaptureConfig(Sink(), "digest"))
