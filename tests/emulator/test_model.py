# SPDX-License-Identifier: Apache-2.0
"""A transformers model runs and learns on the device as it does on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def build(attention: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation=attention,
    )
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_forward_backward_and_adamw_equal_the_cpus(attention):
    host = build(attention)
    device = copy.deepcopy(host).to("npu")
    tokens = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    outputs = []
    for model, ids in ((host, tokens), (device, tokens.to("npu"))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            result = model(ids, labels=ids)
            result.loss.backward()
            optimizer.step()
        outputs.append(result)
    tolerance = {"rtol": 0, "atol": 0} if attention == "eager" else {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(outputs[1].logits.cpu(), outputs[0].logits, **tolerance)
    for ours, wanted in zip(device.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), wanted.detach(), **tolerance)
