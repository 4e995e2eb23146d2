# SPDX-License-Identifier: Apache-2.0
"""The demo model, a real one: speculation changes no greedy token against transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from adaflash.config import EngineConfig
from adaflash.demo.drafter import demo_drafter_dir
from adaflash.demo.model import demo_model_dir
from adaflash.demo.prompts import demo_prompts
from adaflash.engine.engine import Engine
from adaflash.engine.tokenizer import Tokenizer
from adaflash.request import ChatMessage, SamplingParams
from tests.engines import run_all, transformers_greedy, unexcused_difference

BASE = EngineConfig(device="cpu", dtype="float32", kv_cache_memory_bytes=512 * 1024**2, max_model_len=1024)


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """40 real prompts of all domains, templated."""
    tokenizer = Tokenizer(demo_model_dir())
    texts = [prompt.prompt for prompt in demo_prompts()][:40]
    assert len(texts) == 40
    return [tokenizer.render_chat([ChatMessage("user", text)]) for text in texts]


@pytest.fixture(scope="module")
def random_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo drafter's shapes with random weights."""
    directory = tmp_path_factory.mktemp("random_drafter")
    shutil.copy(demo_drafter_dir() / "config.json", directory)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(demo_drafter_dir() / "model.safetensors")
    for name, tensor in tensors.items():
        if name != "d2t":
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = (1 + 0.1 * noise if tensor.dim() == 1 else noise / tensor.shape[1] ** 0.5).to(tensor.dtype)
    save_file(tensors, directory / "model.safetensors")
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]
    return directory


def _check(engine: Engine, reference: LlamaForCausalLM, prompts: list[list[int]], expected: list[list[int]]) -> float:
    outputs = run_all(engine, prompts, SamplingParams(temperature=0.0, max_tokens=len(expected[0])))
    differences = [
        unexcused_difference(reference, prompt, want, output.outputs[0].token_ids)
        for prompt, want, output in zip(prompts, expected, outputs, strict=True)
    ]
    assert [d for d in differences if d is not None] == []
    assert engine.stats().num_verified_tokens > 0
    return engine.stats().num_accepted_tokens / engine.stats().num_drafts


def test_a_slice_equals_transformers(
    reference: LlamaForCausalLM, prompts: list[list[int]], random_drafter: Path
) -> None:
    few = prompts[:2] + prompts[-2:]
    expected = [transformers_greedy(reference, prompt, 16) for prompt in few]
    trained = _check(Engine(replace(BASE, verify_policy="fixed", max_num_seqs=4)), reference, few, expected)
    assert trained > 0.1, "the demo drafter is trained"
    config = replace(
        BASE, model=str(demo_model_dir()), draft=str(random_drafter), verify_policy="fixed", max_num_seqs=1
    )
    _check(Engine(config), reference, few[:1], expected[:1])


@pytest.fixture(scope="module")
def full_expected(reference: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    return [transformers_greedy(reference, prompt, 64) for prompt in prompts]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("policy", ["fixed", "confidence"])
@pytest.mark.parametrize("drafter", ["trained", "random"])
def test_forty_prompts_equal_transformers(
    reference: LlamaForCausalLM,
    prompts: list[list[int]],
    full_expected: list[list[int]],
    random_drafter: Path,
    drafter: str,
    policy: str,
    concurrency: int,
) -> None:
    draft = str(random_drafter) if drafter == "random" else None
    threshold = 1e-6 if drafter == "random" else 0.3  # A random drafter is never confident: let it draft all the same.
    config = replace(BASE, draft=draft, verify_policy=policy, max_num_seqs=concurrency, confidence_threshold=threshold)
    _check(Engine(config), reference, prompts, full_expected)
