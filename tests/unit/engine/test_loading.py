# SPDX-License-Identifier: Apache-2.0
"""Settings and checkpoints that do not fit are refused with a name, a value and what is allowed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.errors import AdaFlashError, BackendError, CheckpointError, ConfigError
from adaflash.ops.backend import Backend
from adaflash.ops.cpu import CpuBackend
from adaflash.request import SamplingParams
from tests.conftest import TinyModelBuilder
from tests.engines import TinySetup
from tests.tiny_drafters import TinyDrafterBuilder


@pytest.fixture(scope="module")
def setup(tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup("llama")


def _config(setup: TinySetup, drafter: str | None = "random") -> EngineConfig:
    draft = None if drafter is None else str(setup.drafters[drafter])
    return EngineConfig(model=str(setup.target), draft=draft, device="cpu", num_kv_blocks=50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 4096}, "max_model_len=4096 is invalid: must be <= 512"),
        ({"max_model_len": 512, "num_kv_blocks": 3}, "3 blocks of 16 tokens, max_model_len=512 needs 32"),
        (
            {"max_num_batched_tokens": 8, "max_num_seqs": 9},
            "max_num_batched_tokens=8 is invalid",
        ),
        ({"num_speculative_tokens": 4}, "num_speculative_tokens=4 is invalid: the drafter proposes 3 at most"),
        ({"num_speculative_tokens": 2, "draft": None}, "num_speculative_tokens=2 has no effect without a drafter"),
        ({"verify_policy": "fixed", "draft": None}, "verify_policy='fixed' needs a drafter"),
        ({"device": "tpu"}, "device='tpu' is not available: installed backends are"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"draft": "/nowhere/either"}, "/nowhere/either"),
    ],
)
def test_settings_that_do_not_fit_are_named(setup: TinySetup, changes: dict[str, object], message: str) -> None:
    with pytest.raises(AdaFlashError, match=message.replace(".", r"\.").replace("(", r"\(")):
        Engine(replace(_config(setup), **changes))


def test_a_policy_without_its_length_head_is_refused(
    setup: TinySetup, tiny_drafter: TinyDrafterBuilder, tmp_path: Path
) -> None:
    draft = tiny_drafter(tmp_path / "headless", setup.target)
    with pytest.raises(ConfigError, match="length head"):
        Engine(replace(_config(setup), draft=str(draft), verify_policy="length_head"))
    engine = Engine(replace(_config(setup), draft=str(draft)))
    assert engine.verify_policy == "goodput"
    with pytest.raises(ConfigError, match="length head"):
        engine.set_verify_policy("length_head")
    assert engine.verify_policy == "goodput", "a refused switch changes nothing"


def test_a_pool_smaller_than_the_models_limit_cuts_the_limit(setup: TinySetup) -> None:
    engine = Engine(replace(_config(setup), num_kv_blocks=3))
    assert engine.info.max_model_len == 48
    reply = engine.generate([5] * 40, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))[0]
    assert len(reply.outputs[0].token_ids) == 8
    assert reply.outputs[0].finish_reason == "length"


def test_strict_ops_accepts_plain_torch_on_a_cpu_and_refuses_a_device_fallback(
    setup: TinySetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(_config(setup), strict_ops=True)
    Engine(config)
    monkeypatch.setattr("adaflash.ops.cpu.CpuBackend.reference_is_native", False)
    with pytest.raises(BackendError, match=r"strict_ops: backend cpu runs reference bodies for .*sample"):
        Engine(config)


def test_strict_ops_fails_the_step_in_which_a_kernel_cannot_take_a_shape(
    setup: TinySetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silu_and_mul(self: CpuBackend, gate_up: Tensor) -> Tensor:
        if gate_up.shape[0] > 4:
            self.report_fallback("silu_and_mul", "at most 4 rows", f"{gate_up.shape[0]} rows")
        return Backend.silu_and_mul(self, gate_up)

    monkeypatch.setattr(CpuBackend, "silu_and_mul", silu_and_mul)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for strict_ops in (False, True):
        engine = Engine(replace(_config(setup), strict_ops=strict_ops, verify_policy="off"))
        engine.generate([5] * 4, params)
        if strict_ops:
            with pytest.raises(BackendError, match=r"silu_and_mul natively for at most 4 rows only, found 5 rows"):
                engine.generate([5] * 5, params)
        else:
            engine.generate([5] * 5, params)


def test_a_drafter_wider_than_the_backend_takes_is_refused(setup: TinySetup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "max_draft_block_size", 4)
    Engine(_config(setup))
    monkeypatch.setattr(CpuBackend, "max_draft_block_size", 3)
    Engine(_config(setup, None))
    with pytest.raises(BackendError, match="block_size=4 is invalid on cpu: must be <= 3"):
        Engine(_config(setup))


@pytest.mark.parametrize("damage", ["truncated", "header", "empty"])
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_a_damaged_checkpoint_is_refused_by_name(setup: TinySetup, tmp_path: Path, which: str, damage: str) -> None:
    source = setup.target if which == "target" else setup.drafters["random"]
    copy = tmp_path / which
    shutil.copytree(source, copy)
    weights = copy / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes({"truncated": data[:-100], "header": b"\xff" * 8 + data[8:], "empty": b""}[damage])
    field = "model" if which == "target" else "draft"
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Engine(replace(_config(setup), **{field: str(copy)}))


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", 64), ("vocab_size", 96), ("num_target_layers", 7), ("draft_vocab_size", 200)]
)
def test_a_drafter_of_another_target_is_refused_by_name(setup: TinySetup, tmp_path: Path, key: str, value: int) -> None:
    copy = tmp_path / "drafter"
    shutil.copytree(setup.drafters["random"], copy)
    config = json.loads((copy / "config.json").read_text())
    config[key] = value
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=key):
        Engine(replace(_config(setup), draft=str(copy)))


def test_a_drafter_with_a_shorter_limit_leaves_the_rest_to_plain_decoding(
    setup: TinySetup, tiny_llama: TinyModelBuilder, tiny_drafter: TinyDrafterBuilder, tmp_path: Path
) -> None:
    draft = tiny_drafter(tmp_path / "short", setup.target, config={"max_position_embeddings": 24})
    engine = Engine(replace(_config(setup), draft=str(draft), verify_policy="fixed"))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    reply = engine.generate([5] * 10, params)[0]
    plain = Engine(_config(setup, None)).generate([5] * 10, params)[0]
    assert reply.outputs[0].token_ids == plain.outputs[0].token_ids
    assert 0 < reply.speculation.num_verified_tokens < 3 * reply.speculation.num_rounds / 2
