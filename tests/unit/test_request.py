# SPDX-License-Identifier: Apache-2.0
"""Bad sampling parameters and prompts name the field, the value and what is allowed."""

from __future__ import annotations

import math

import pytest

from adaflash.errors import RequestError
from adaflash.request import SamplingParams, check_prompt


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", "none"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: 101.0}),
    ],
)
def test_a_bad_parameter_is_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{field}=.* is invalid: must be") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_without_a_token_limit_any_minimum_is_allowed() -> None:
    params = SamplingParams(max_tokens=None, min_tokens=1000)
    assert params.max_tokens is None
    with pytest.raises(RequestError, match=r"^min_tokens=-1 is invalid"):
        SamplingParams(max_tokens=None, min_tokens=-1)


@pytest.mark.parametrize("token_id", [-1, 97, 2**32 - 1])
@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias", "prompt_token_ids"])
def test_a_token_id_outside_the_vocabulary_is_named(field: str, token_id: int) -> None:
    checks = {
        "stop_token_ids": lambda: SamplingParams(stop_token_ids=[token_id]).check_vocabulary(97),
        "logit_bias": lambda: SamplingParams(logit_bias={token_id: 1.0}).check_vocabulary(97),
        "prompt_token_ids": lambda: check_prompt([5, token_id], 97, 100),
    }
    with pytest.raises(RequestError, match=rf"{field}={token_id} is invalid: must be token ids in \[0, 97\)"):
        checks[field]()


@pytest.mark.parametrize(("prompt", "field"), [([], "prompt_token_ids"), ([5] * 100, "prompt length")])
def test_a_prompt_of_no_or_too_many_tokens_is_refused(prompt: list[int], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_prompt(prompt, 97, 100)
    assert caught.value.field == field


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=["x" * 1000] * 17)
    assert len(str(caught.value)) < 200
