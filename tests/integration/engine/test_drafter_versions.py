# SPDX-License-Identifier: Apache-2.0
"""New drafter versions between steps: no token changes, requests keep theirs, at most two are resident."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaflash.cache.block_manager import MIXED_CONTEXT
from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend
from adaflash.request import RequestOutput, SamplingParams
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_loader import load_drafter, load_version
from adaflash.training.canary import CanaryConfig
from tests.engines import TinySetup, random_prompts, run_all, step_until_done, tiny_engine
from tests.tiny_drafters import TinyDrafterBuilder

VOCAB = 97
PROMPTS = random_prompts(24, VOCAB, 30)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, presence_penalty=0.5, ignore_eos=True)
CONFIG = EngineConfig(verify_policy="fixed", max_num_seqs=8, num_kv_blocks=64, max_model_len=96, block_size=8)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def setup(request: pytest.FixtureRequest, tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup(request.param)


def canary(fraction: float) -> CanaryConfig:
    """A trial that no test here is long enough to decide."""
    return CanaryConfig(fraction=fraction, min_requests=1000, max_requests=1000)


def _version(engine: Engine, setup: TinySetup, version: int) -> DFlashDrafter:
    """The other one of the two tiny drafters, under a new number."""
    served = engine.rollout.drafters.current
    assert isinstance(served, DFlashDrafter)
    drafter = load_version(setup.drafters[("random", "zero")[version % 2]], served, version)
    drafter.pack()
    return drafter


def _swap_until_done(engine: Engine, setup: TinySetup, params: SamplingParams, seed: int) -> dict[str, RequestOutput]:
    """Submit all prompts, swap, roll back, promote and retire at random; returns the last delta of each request."""
    rng = random.Random(seed)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params, str(index))
    next_version, dispatched = 1, 0

    def act(step: int) -> None:
        nonlocal next_version, dispatched
        drafters = engine.rollout.drafters
        assert len(drafters.versions) <= 2
        choice = rng.random()
        if drafters.candidate is not None and choice < 0.3:
            engine.rollout.promote()
        elif drafters.candidate is not None and choice < 0.6:
            engine.rollout.roll_back("by hand")
        elif drafters.draining is not None and choice < 0.5:
            engine.rollout.retire(drafters.draining)
        elif drafters.has_room:
            engine.rollout.introduce(_version(engine, setup, next_version), rng.choice([None, canary(0.5)]))
            next_version += 1
        if dispatched < 24 and step % 2:
            engine.add_request(PROMPTS[dispatched % len(PROMPTS)], params, f"late{dispatched}")
            dispatched += 1

    last: dict[str, RequestOutput] = {}
    tokens: dict[str, list[int]] = {}
    for delta in step_until_done(engine, act):
        tokens.setdefault(delta.request_id, []).extend(delta.outputs[0].token_ids)
        last[delta.request_id] = delta
    assert next_version > 10, "versions were swapped"
    for request_id, output in last.items():
        output.outputs[0].token_ids = tokens[request_id]
    return last


@pytest.mark.parametrize("coupling", ["gumbel", "rejection"])
@pytest.mark.parametrize("num_kv_blocks", [64, 18])
def test_swapping_at_every_turn_changes_no_greedy_token(setup: TinySetup, num_kv_blocks: int, coupling: str) -> None:
    config = replace(CONFIG, num_kv_blocks=num_kv_blocks, sampling_coupling=coupling)
    plain = run_all(tiny_engine(setup, None, replace(config, verify_policy="off")), PROMPTS, GREEDY)
    expected = [output.outputs[0].token_ids for output in plain]
    engine = tiny_engine(setup, "random", config)
    outputs = _swap_until_done(engine, setup, GREEDY, seed=num_kv_blocks)
    for request_id, output in outputs.items():
        index = int(request_id.removeprefix("late")) % len(PROMPTS)
        assert output.outputs[0].token_ids == expected[index], request_id
    assert engine.stats().num_verified_tokens > 0
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks


def test_swapping_changes_no_sampled_token(setup: TinySetup) -> None:
    expected = run_all(tiny_engine(setup, None, replace(CONFIG, verify_policy="off")), PROMPTS, SAMPLED)
    outputs = _swap_until_done(tiny_engine(setup, "random", CONFIG), setup, SAMPLED, seed=3)
    for index, want in enumerate(expected):
        assert outputs[str(index)].outputs[0].token_ids == want.outputs[0].token_ids


def test_requests_keep_the_version_they_were_dispatched_with(setup: TinySetup) -> None:
    engine = tiny_engine(setup, "random", CONFIG)
    for index in range(3):
        engine.add_request(PROMPTS[index], GREEDY, f"old{index}")
    engine.step()
    engine.rollout.introduce(_version(engine, setup, 1))
    for index in range(3):
        engine.add_request(PROMPTS[index + 3], GREEDY, f"new{index}")
    assert engine.rollout.drafters.versions == [0, 1]
    deltas = {delta.request_id: delta for delta in step_until_done(engine, lambda _: None)}
    for name, delta in deltas.items():
        assert delta.speculation.drafter_versions == ((0,) if name.startswith("old") else (1,))
    assert engine.rollout.drafters.versions == [1], "the old version is dropped with its last request"


def test_samples_of_a_request_share_its_version(setup: TinySetup) -> None:
    engine = tiny_engine(setup, "random", CONFIG)
    engine.rollout.introduce(_version(engine, setup, 1), canary(0.5))
    outputs = engine.generate([PROMPTS[0]] * 4, replace(SAMPLED, n=3))
    assert sorted(output.speculation.drafter_versions for output in outputs) == [(0,), (0,), (1,), (1,)]


def test_a_candidate_gets_its_share_of_new_requests(setup: TinySetup) -> None:
    engine = tiny_engine(setup, "random", CONFIG)
    engine.rollout.introduce(_version(engine, setup, 1), canary(0.25))
    outputs = run_all(engine, PROMPTS, replace(GREEDY, max_tokens=4))
    versions = [output.speculation.drafter_versions for output in outputs]
    assert versions.count((1,)) == len(PROMPTS) // 4
    engine.rollout.promote()
    assert engine.rollout.drafters.versions == [1]


def test_requests_of_a_rolled_back_candidate_go_on_with_the_good_version(setup: TinySetup) -> None:
    engine = tiny_engine(setup, "random", CONFIG)
    engine.rollout.introduce(_version(engine, setup, 1), canary(0.99))
    for index in range(6):
        engine.add_request(PROMPTS[index], GREEDY, str(index))
    for _ in range(3):
        engine.step()
    engine.rollout.roll_back("by hand")
    assert engine.rollout.drafters.versions == [0]
    deltas = {delta.request_id: delta for delta in step_until_done(engine, lambda _: None)}
    assert {delta.speculation.drafter_versions for delta in deltas.values()} <= {(0,), (1, 0)}
    assert any(delta.speculation.drafter_versions == (1, 0) for delta in deltas.values())


def test_cached_rows_of_another_version_are_computed_again_and_replaced(setup: TinySetup) -> None:
    engine = tiny_engine(setup, "random", CONFIG)
    prompt, blocks = list(range(5, 5 + 20)), engine._blocks
    engine.generate(prompt, replace(GREEDY, max_tokens=8))
    old = engine.rollout.drafters.current.context_id
    assert len(blocks.match_prefix(prompt, old).blocks) == 2
    engine.rollout.introduce(_version(engine, setup, 1))
    new = engine.rollout.drafters.current.context_id
    for num_cached in (0, 16):  # the first request of the new version, and the second
        engine.add_request([*prompt, 3, 4], GREEDY)
        engine.step()
        (sample,) = engine._samples.values()
        assert sample.seq.num_cached_tokens == num_cached
        assert sample.seq.is_context_pure
        step_until_done(engine, lambda _: None)
    assert not blocks.match_prefix(prompt, old).blocks
    assert len(blocks.match_prefix(prompt, new).blocks) == 2


def test_cached_blocks_know_who_wrote_their_drafter_rows(setup: TinySetup) -> None:
    engine = tiny_engine(setup, "random", CONFIG)
    blocks = engine._blocks
    engine.rollout.introduce(_version(engine, setup, 1))
    first = engine.rollout.drafters.current.context_id
    engine.add_request(list(range(40, 62)), GREEDY, "moved")
    engine.step()
    (sample,) = engine._samples.values()
    assert sample.seq.is_context_pure
    engine.rollout.introduce(_version(engine, setup, 2))
    second = engine.rollout.drafters.current.context_id
    engine.rollout.retire(1)
    assert not sample.seq.is_context_pure
    step_until_done(engine, lambda _: None)
    written_by = [blocks.context_id(b) for b in blocks.match_prefix(sample.seq.token_ids).blocks]
    assert written_by[:2] == [first, first]
    assert written_by[2:] == [MIXED_CONTEXT, *[second] * (len(written_by) - 3)]


def _changed(engine: Engine, setup: TinySetup, folder: Path, tensor: str) -> DFlashDrafter:
    """Version 1: the served weights but for one tensor."""
    served = engine.rollout.drafters.current
    assert isinstance(served, DFlashDrafter)
    source = setup.drafters["random"]
    tensors = load_file(source / "model.safetensors")
    tensors[tensor] = tensors[tensor] * 1.5
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    drafter = load_version(folder, served, 1)
    drafter.pack()
    return drafter


CONTEXT_TENSORS = ("fc", "hidden_norm", *(f"layers.1.self_attn.{name}" for name in ("k_proj", "v_proj", "k_norm")))
OTHER_TENSORS = (
    "norm",
    "layers.0.input_layernorm",
    "layers.1.self_attn.q_proj",
    "layers.1.self_attn.q_norm",
    "layers.0.self_attn.o_proj",
    "layers.1.mlp.down_proj",
)


@pytest.mark.parametrize("name", [*CONTEXT_TENSORS, *OTHER_TENSORS])
def test_the_identity_of_a_context_is_that_of_the_weights_that_write_it(
    setup: TinySetup, tmp_path: Path, name: str
) -> None:
    engine = tiny_engine(setup, "random", CONFIG)
    changed = _changed(engine, setup, tmp_path, f"{name}.weight")
    is_same = changed.context_id == engine.rollout.drafters.current.context_id
    assert is_same == (name in OTHER_TENSORS)


@pytest.mark.parametrize(("name", "is_same"), [("q_proj", True), ("k_proj", False), ("v_proj", False)])
def test_biases_of_keys_and_values_are_part_of_a_context(
    setup: TinySetup, tiny_drafter: TinyDrafterBuilder, tmp_path: Path, name: str, is_same: bool
) -> None:
    served_dir = tiny_drafter(tmp_path / "served", setup.target, config={"attention_bias": True})
    served = load_drafter(served_dir, load_target(setup.target, Backend("cpu")), Backend("cpu"))
    tensors = load_file(served_dir / "model.safetensors")
    tensors[f"layers.0.self_attn.{name}.bias"] += 1
    save_file(tensors, served_dir / "model.safetensors")
    assert (load_version(served_dir, served, 1).context_id == served.context_id) == is_same


def test_a_version_with_the_same_context_goes_on_with_what_others_wrote(setup: TinySetup, tmp_path: Path) -> None:
    engine = tiny_engine(setup, "random", CONFIG)
    prompt = list(range(5, 5 + 20))
    engine.generate(prompt, replace(GREEDY, max_tokens=8))
    engine.add_request(list(range(40, 62)), GREEDY, "moved")
    engine.step()
    (moved,) = (sample.seq for sample in engine._samples.values())
    engine.rollout.introduce(_changed(engine, setup, tmp_path, "layers.0.mlp.down_proj.weight"))
    engine.add_request([*prompt, 3, 4], GREEDY, "new")
    engine.step()
    (new,) = (sample.seq for sample in engine._samples.values() if sample.seq is not moved)
    assert (new.num_cached_tokens, new.drafter_version, new.is_context_pure) == (16, 1, True)
    engine.rollout.retire(0)
    assert (moved.drafter_version, moved.is_context_pure) == (1, True)
    step_until_done(engine, lambda _: None)
    context_id = engine.rollout.drafters.current.context_id
    written_by = [engine._blocks.context_id(b) for b in engine._blocks.match_prefix(moved.token_ids).blocks]
    assert written_by == [context_id] * len(written_by)


def test_versions_with_the_same_context_write_their_rows_together(
    setup: TinySetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_writes = [0]
    write = DFlashDrafter.write_context

    def counted(drafter: DFlashDrafter, *args: Tensor) -> None:
        num_writes[0] += 1
        write(drafter, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DFlashDrafter, "write_context", counted)
    engine = tiny_engine(setup, "random", CONFIG)
    for tensor, expected in (("layers.0.mlp.down_proj.weight", 1), ("fc.weight", 2)):
        for index in range(2):
            engine.add_request(PROMPTS[index], GREEDY)
            if index == 0:
                engine.rollout.introduce(_changed(engine, setup, tmp_path, tensor), canary(0.5))
                engine.add_request(PROMPTS[2], GREEDY)
        for _ in range(2):
            engine.step()
        assert {sample.seq.drafter_version for sample in engine._samples.values()} == {0, 1}
        num_writes[0] = 0
        engine.step()
        assert num_writes[0] == expected, tensor
        step_until_done(engine, lambda _: None)
        engine.rollout.roll_back("by hand")


def test_samples_that_fork_know_which_rows_of_their_prompt_older_weights_wrote(
    setup: TinySetup, tmp_path: Path
) -> None:
    engine = tiny_engine(setup, "random", replace(CONFIG, max_num_batched_tokens=16))
    engine.add_request(list(range(40, 70)), replace(SAMPLED, n=3), "many")
    engine.step()
    engine.rollout.introduce(_changed(engine, setup, tmp_path, "fc.weight"))
    engine.rollout.retire(0)
    context_id = engine.rollout.drafters.current.context_id
    while len(engine._samples) < 3 or not all(sample.seq.is_decoding for sample in engine._samples.values()):
        engine.step()
    seqs = [sample.seq for sample in engine._samples.values()]
    assert [(seq.context_id, seq.context_start, seq.is_context_pure) for seq in seqs] == [(context_id, 16, False)] * 3


@pytest.mark.parametrize(("tensor", "writers"), [("fc.weight", [0, 1]), ("layers.0.mlp.down_proj.weight", [0])])
def test_context_that_was_put_off_is_written_once_for_all_with_the_same_weights(
    setup: TinySetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: str, writers: list[int]
) -> None:
    engine = tiny_engine(setup, "random", replace(CONFIG, verify_policy="goodput"))
    engine.rollout.introduce(_changed(engine, setup, tmp_path, tensor), canary(0.5))
    for index in range(4):
        engine.add_request(PROMPTS[index], GREEDY)
    engine.step()
    seqs = [sample.seq for sample in engine._samples.values()]
    assert {seq.drafter_version for seq in seqs} == {0, 1}
    runner, written = engine._runner, []
    assert runner.backlog is not None
    monkeypatch.setattr(runner.backlog, "take", lambda keys: torch.zeros(len(keys), 1))
    monkeypatch.setattr("adaflash.engine.runner._pending_rows", lambda seqs, *_: (torch.zeros(0), torch.zeros(0)))
    monkeypatch.setattr(DFlashDrafter, "write_context", lambda drafter, *args: written.append(drafter.version))
    runner.write_pending(seqs)
    assert sorted(written) == writers
