# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from adaflash.errors import ConfigError
from adaflash.request import ChatMessage
from adaflash.training.training_data import TokenSample, read_training_data


def test_samples_and_prompts_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"token_ids": [1, 2, 3], "num_prompt_tokens": 1, "domain": "x"}\n\n{"prompt": "hi"}\n'
        '{"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]}\n'
    )
    data = read_training_data(path)
    assert data.samples == [TokenSample([1, 2, 3], 1)]
    assert data.prompts == ["hi", [ChatMessage("system", "be"), ChatMessage("user", "hi")]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is no JSON"),
        ("[]", "line 1 has no sample: must be an object with token_ids with num_prompt_tokens, prompt, or messages"),
        ('{"text": "hi"}', "line 1 has no sample"),
        ('{"prompt": "hi", "token_ids": [1]}', "line 1 has token_ids and prompt"),
        ('{"token_ids": [1, -1], "num_prompt_tokens": 1}', "token_ids is invalid: must be a list of integers >= 0"),
        ('{"token_ids": [1, true], "num_prompt_tokens": 1}', "token_ids is invalid"),
        ('{"token_ids": [1, 2]}', r"num_prompt_tokens=None is invalid: must be an integer in \[0, 2\]"),
        ('{"token_ids": [1, 2], "num_prompt_tokens": 3}', "num_prompt_tokens=3 is invalid"),
        ('{"prompt": ""}', "prompt='' is invalid: must be a text"),
        ('{"messages": []}', "messages is invalid"),
        ('{"messages": [{"role": "user"}]}', "content=None is invalid"),
        ("", "holds no samples"),
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_training_data(path)
