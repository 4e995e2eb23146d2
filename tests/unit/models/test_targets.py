# SPDX-License-Identifier: Apache-2.0
"""Every family computes what transformers computes, through the paged cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend
from adaflash.ops.cpu import CpuBackend

TOLERANCE = 1e-4  # fp32, logits of order 1

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_MSCALE_ROPE = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16, "truncate": False}
WINDOWS: dict[str, object] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_mha_default_head_dim": ("llama", {"num_key_value_heads": 4, "head_dim": None}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "llama_rope_llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama_rope_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "llama_rope_dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_biases": ("qwen3", {"attention_bias": True}),
    "qwen3_windows": ("qwen3", WINDOWS),
    "qwen3_layer_types": (
        "qwen3",
        WINDOWS | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3_rope_yarn": ("qwen3", {"rope_parameters": YARN_ROPE}),
    "qwen3_rope_yarn_attention_factor": ("qwen3", {"rope_parameters": YARN_ROPE | {"attention_factor": 1.3}}),
    "qwen3_rope_yarn_mscale": ("qwen3", {"rope_parameters": YARN_MSCALE_ROPE}),
}


@pytest.fixture(params=CASES)
def models(
    request: pytest.FixtureRequest, tmp_path: Path, backend: Backend, tiny_llama: Any, tiny_qwen3: Any
) -> tuple[Any, Any]:
    family, config = CASES[request.param]
    reference = {"llama": tiny_llama, "qwen3": tiny_qwen3}[family](tmp_path, config)
    return reference, load_target(tmp_path, backend)


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


@torch.inference_mode()
def test_logits_equal_transformers_in_prefill_chunks_and_decode(models: tuple[Any, Any], paged_runner: Any) -> None:
    reference, target = models
    prompts = [random_prompt(length, seed) for seed, length in enumerate((17, 1, 40))]
    expected = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    assert min(logits.abs().max().item() for logits in expected) > 1  # the comparison is not vacuous
    runner = paged_runner(target, num_seqs=3)
    got: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    # All three prefill at once, chunks ending anywhere; then sequence 0 decodes while 2 is still being prefilled.
    for chunks in ({2: 13, 0: 14, 1: 1}, {0: 1, 2: 9}, {0: 1, 2: 16}, {2: 1, 0: 1}, {2: 1}):
        step = {s: prompts[s][runner.lens[s] : runner.lens[s] + count] for s, count in chunks.items()}
        for s, logits in zip(step, runner.logits(step), strict=True):
            got[s].append(logits)
    for s, logits in enumerate(expected):
        torch.testing.assert_close(torch.cat(got[s]), logits, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_taps_equal_hidden_states_in_the_order_asked_for(models: tuple[Any, Any], paged_runner: Any) -> None:
    reference, target = models
    prompts = [random_prompt(length, seed) for seed, length in enumerate((9, 6))]
    output = paged_runner(target, num_seqs=2).step({0: prompts[0], 1: prompts[1]}, tap_layer_ids=(1, 0))
    states = [reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states for prompt in prompts]
    expected = torch.cat([torch.cat((state[2][0], state[1][0]), dim=-1) for state in states])
    torch.testing.assert_close(output.taps, expected, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_tap_of_the_last_layer_is_the_residual_before_the_final_norm(
    tmp_path: Path, backend: Backend, tiny_llama: Any, paged_runner: Any
) -> None:
    reference = tiny_llama(tmp_path)
    target = load_target(tmp_path, backend)
    output = paged_runner(target, num_seqs=1).step({0: random_prompt(7, 0)}, tap_layer_ids=(2,))
    torch.testing.assert_close(reference.model.norm(output.taps), output.hidden, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_packing_changes_no_logit(models: tuple[Any, Any], paged_runner: Any) -> None:
    _, target = models
    prompt = random_prompt(11, 0)
    plain = paged_runner(target, num_seqs=1).logits({0: prompt})[0]
    target.pack()
    torch.testing.assert_close(paged_runner(target, num_seqs=1).logits({0: prompt})[0], plain, atol=1e-5, rtol=0)


def test_packing_drops_every_linear_weight_but_the_embedding(tmp_path: Path, backend: Backend, tiny_llama: Any) -> None:
    tiny_llama(tmp_path, {"tie_word_embeddings": True, "attention_bias": True})
    target: Any = load_target(tmp_path, backend)
    target.pack()
    kept = [name for name, _ in target.named_parameters() if not name.endswith("norm.weight")]
    assert kept == ["model.embed_tokens.weight"]
    assert target.embed(torch.tensor([[1, 2]])).shape == (1, 2, 32)


@pytest.mark.parametrize("tied", [True, False])
def test_reduced_head_returns_the_chosen_columns(tmp_path: Path, backend: Backend, tiny_llama: Any, tied: bool) -> None:
    tiny_llama(tmp_path, {"tie_word_embeddings": tied})
    target = load_target(tmp_path, backend)
    token_ids, hidden = torch.tensor([5, 90, 0]), torch.randn(4, 32)
    head = target.reduced_head(token_ids)
    target.pack()
    torch.testing.assert_close(head(hidden), target.compute_logits(hidden)[:, token_ids])


def test_forward_is_differentiable_on_the_reference_backend(
    tmp_path: Path, backend: Backend, tiny_qwen3: Any, paged_runner: Any
) -> None:
    tiny_qwen3(tmp_path)
    target: Any = load_target(tmp_path, backend)
    target.requires_grad_(True)
    paged_runner(target, num_seqs=1).logits({0: random_prompt(6, 0)})[0].sum().backward()
    assert [name for name, parameter in target.named_parameters() if parameter.grad is None] == []


@torch.inference_mode()
def test_bfloat16_computes_close_to_transformers(
    tmp_path: Path, backend: Backend, tiny_qwen3: Any, paged_runner: Any
) -> None:
    reference = tiny_qwen3(tmp_path, dtype=torch.bfloat16)
    target = load_target(tmp_path, backend)
    assert target.dtype == torch.bfloat16
    prompt = random_prompt(12, 0)
    expected = reference(torch.tensor([prompt])).logits[0].float()
    got = paged_runner(target, num_seqs=1).logits({0: prompt})[0].float()
    assert (got - expected).abs().mean() < 0.03 * expected.abs().mean()


@torch.inference_mode()
@pytest.mark.parametrize("packed", [False, True])
def test_cpu_backend_computes_what_the_reference_computes(
    tmp_path: Path, backend: Backend, tiny_qwen3: Any, paged_runner: Any, packed: bool
) -> None:
    tiny_qwen3(tmp_path, WINDOWS)
    prompts = {0: random_prompt(19, 0), 1: random_prompt(5, 1)}
    expected = paged_runner(load_target(tmp_path, backend), num_seqs=2).logits(prompts)
    target = load_target(tmp_path, CpuBackend())
    if packed:
        target.pack()
    runner = paged_runner(target, num_seqs=2)
    got = [
        torch.cat(pair)
        for pair in zip(
            runner.logits({0: prompts[0][:8], 1: prompts[1][:4]}),
            runner.logits({0: prompts[0][8:], 1: prompts[1][4:]}),
            strict=True,
        )
    ]
    for logits, reference_logits in zip(got, expected, strict=True):
        torch.testing.assert_close(logits, reference_logits, atol=TOLERANCE, rtol=0)
