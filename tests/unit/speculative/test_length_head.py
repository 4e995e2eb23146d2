# SPDX-License-Identifier: Apache-2.0
"""The threshold length head against its formula."""

from __future__ import annotations

import math

import pytest
import torch

from adaflash.speculative.length_head import ThresholdLengthHead

HIDDEN, BOTTLENECK = 6, 4


@pytest.fixture
def head() -> ThresholdLengthHead:
    torch.manual_seed(3)
    return ThresholdLengthHead(HIDDEN, BOTTLENECK)


def test_the_ratio_follows_the_formula_number_by_number(head: ThresholdLengthHead) -> None:
    hidden = torch.randn(3, 5, HIDDEN)
    expected = []
    for block in hidden.tolist():
        features = [sum(row[i] for row in block) / 5 for i in range(HIDDEN)] + block[4]
        h = [silu(value) for value in affine(head.down, features)]
        h = [value + silu(more) for value, more in zip(h, affine(head.res[0], h), strict=True)]
        expected.append(1 / (1 + math.exp(-affine(head.out, h)[0])))
    torch.testing.assert_close(head.predict(hidden), torch.tensor(expected))


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


def affine(layer: torch.nn.Module, x: list[float]) -> list[float]:
    assert isinstance(layer, torch.nn.Linear)
    return [
        bias + sum(w * value for w, value in zip(row, x, strict=True))
        for row, bias in zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
    ]


def test_bfloat16_states_are_judged_in_float32(head: ThresholdLengthHead) -> None:
    hidden = torch.randn(2, 5, HIDDEN).bfloat16()
    ratio = head.predict(hidden)
    assert ratio.dtype == torch.float32
    torch.testing.assert_close(ratio, head.predict(hidden.float()))


def test_blocks_are_judged_one_by_one(head: ThresholdLengthHead) -> None:
    hidden = torch.randn(4, 5, HIDDEN)
    torch.testing.assert_close(head.predict(hidden)[2], head.predict(hidden[2:3])[0])


def test_training_it_leaves_detached_states_alone(head: ThresholdLengthHead) -> None:
    hidden = torch.randn(2, 5, HIDDEN, requires_grad=True)
    head.predict(hidden.detach()).sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is None
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_parameter_names_are_those_of_the_checkpoint(head: ThresholdLengthHead) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    assert shapes == {
        "down.weight": (4, 12),
        "down.bias": (4,),
        "res.0.weight": (4, 4),
        "res.0.bias": (4,),
        "out.weight": (1, 4),
        "out.bias": (1,),
    }
