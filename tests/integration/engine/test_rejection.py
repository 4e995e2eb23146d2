# SPDX-License-Identifier: Apache-2.0
"""Sampling through the whole engine follows the target's law exactly, under either coupling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.request import SamplingParams
from tests.conftest import TinyModelBuilder
from tests.engines import TinySetup, tiny_engine
from tests.tiny_drafters import TinyDrafterBuilder
from tests.toy_speculation import p_value

VOCAB = 16
PROMPT = [3, 9, 4]
NUM_GENERATIONS = 20_480
ALPHA = 1e-3
TEMPERATURE, TOP_P = 0.8, 0.95


@pytest.fixture(scope="module")
def setup(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: TinyModelBuilder, tiny_drafter: TinyDrafterBuilder
) -> TinySetup:
    """A model of 16 tokens with flat enough distributions, and a random drafter."""
    directory: Path = tmp_path_factory.mktemp("rejection")
    config = {"vocab_size": VOCAB, "num_hidden_layers": 2}
    model = tiny_llama(directory / "target", config=config, logit_scale=0.5)
    drafter = tiny_drafter(directory / "drafter", directory / "target", length_head=True)
    return TinySetup(model, directory / "target", {"random": drafter})


def _filtered(logits: torch.Tensor) -> np.ndarray:
    """Temperature, then the smallest set of tokens that reaches TOP_P, by the definition."""
    probs = torch.softmax(logits.double() / TEMPERATURE, -1).numpy()
    kept = np.zeros_like(probs)
    for row, out in zip(probs, kept, strict=True):
        order = np.argsort(-row)
        before = np.concatenate([[0.0], np.cumsum(row[order])[:-1]])
        chosen = order[before < TOP_P]
        out[chosen] = row[chosen]
    return kept / kept.sum(-1, keepdims=True)


def _exact_pairs(model: PreTrainedModel) -> np.ndarray:
    """P(token 2, token 3) by enumerating tokens 1 to 3."""
    first = _filtered(model(torch.tensor([PROMPT])).logits[:, -1])[0]
    ones = torch.tensor([[*PROMPT, a] for a in range(VOCAB)])
    second = _filtered(model(ones).logits[:, -1])
    twos = torch.tensor([[*PROMPT, a, b] for a in range(VOCAB) for b in range(VOCAB)])
    third = _filtered(model(twos).logits[:, -1]).reshape(VOCAB, VOCAB, VOCAB)
    return np.einsum("a,ab,abc->bc", first, second, third)


def _pair_counts(engine: Engine) -> np.ndarray:
    counts = np.zeros((VOCAB, VOCAB))
    for seed in range(NUM_GENERATIONS // 128):
        params = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, n=128, seed=seed, max_tokens=4, ignore_eos=True)
        for output in engine.generate(PROMPT, params)[0].outputs:
            counts[output.token_ids[1], output.token_ids[2]] += 1
    return counts


@pytest.mark.parametrize("coupling", ["rejection", "gumbel"])
@pytest.mark.parametrize("policy", ["fixed", "confidence"])
def test_the_joint_of_tokens_two_and_three_is_exact(setup: TinySetup, coupling: str, policy: str) -> None:
    config = EngineConfig(
        verify_policy=policy,
        sampling_coupling=coupling,
        confidence_threshold=0.12,
        max_num_seqs=128,
        num_kv_blocks=400,
        max_model_len=64,
    )
    engine = tiny_engine(setup, "random", config)
    counts, exact = _pair_counts(engine), _exact_pairs(setup.model)
    stats = engine.stats()
    assert 0.1 < stats.num_accepted_tokens / stats.num_verified_tokens < 0.95, "both outcomes are exercised"
    if policy == "confidence":
        assert stats.num_verified_tokens < 2 * stats.num_drafts, "the policy cuts some blocks"
    assert p_value(counts.ravel(), exact.ravel()) > ALPHA
    shift = np.zeros_like(exact)
    low, high = np.unravel_index(exact.argmin(), exact.shape), np.unravel_index(exact.argmax(), exact.shape)
    shift[high], shift[low] = -0.02, 0.02
    assert p_value(counts.ravel(), (exact + shift).ravel()) < ALPHA, "a bias of total variation 0.02 is noticed"
