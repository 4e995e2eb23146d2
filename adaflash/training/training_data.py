# SPDX-License-Identifier: Apache-2.0
"""Reads a file of samples for offline training: finished ones as token ids, or prompts to be answered first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from adaflash.errors import ConfigError
from adaflash.models.strict_json import parse_json
from adaflash.request import ChatMessage, Prompt

_KINDS = "token_ids with num_prompt_tokens, prompt, or messages"


class TokenSample(NamedTuple):
    """A prompt and the target's response to it, end to end."""

    token_ids: list[int]
    num_prompt_tokens: int


class TrainingData(NamedTuple):
    """Samples of a file: those that are finished, and prompts that still need a response."""

    samples: list[TokenSample]
    prompts: list[Prompt]


def read_training_data(path: Path) -> TrainingData:
    """Read JSON lines, each with `token_ids` and `num_prompt_tokens`, or with `prompt` or `messages`.

    Raises:
        ConfigError: The file cannot be read or holds nothing; or names line and key, and what is allowed.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"data={str(path)!r} cannot be read: {error}") from error
    samples: list[TokenSample] = []
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        sample = _parse(line, f"{path} line {number}")
        if isinstance(sample, TokenSample):
            samples.append(sample)
        else:
            prompts.append(sample)
    if not samples and not prompts:
        raise ConfigError(f"data={str(path)!r} holds no samples: must be lines of JSON with {_KINDS}")
    return TrainingData(samples, prompts)


def _parse(line: bytes, place: str) -> TokenSample | Prompt:
    try:
        values = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{place} is no JSON: {error}") from error
    found = [key for key in ("token_ids", "prompt", "messages") if isinstance(values, dict) and key in values]
    if not isinstance(values, dict) or len(found) != 1:
        raise ConfigError(f"{place} has {' and '.join(found) or 'no sample'}: must be an object with {_KINDS}")
    if found == ["token_ids"]:
        return _token_sample(values, place)
    return _messages(values["messages"], place) if found == ["messages"] else _text(values["prompt"], place, "prompt")


def _token_sample(values: Mapping[str, object], place: str) -> TokenSample:
    token_ids, num_prompt_tokens = values["token_ids"], values.get("num_prompt_tokens")
    if not isinstance(token_ids, list) or not all(type(token) is int and token >= 0 for token in token_ids):
        raise ConfigError(f"{place}: token_ids is invalid: must be a list of integers >= 0")
    if type(num_prompt_tokens) is not int or not 0 <= num_prompt_tokens <= len(token_ids):
        raise ConfigError(
            f"{place}: num_prompt_tokens={num_prompt_tokens!r} is invalid: must be an integer in [0, {len(token_ids)}]"
        )
    return TokenSample(token_ids, num_prompt_tokens)


def _messages(value: object, place: str) -> Prompt:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"{place}: messages is invalid: must be a list of objects with role and content")
    return [
        ChatMessage(_text(item.get("role"), place, "role"), _text(item.get("content"), place, "content"))
        for item in value
    ]


def _text(value: object, place: str, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{place}: {key}={value!r} is invalid: must be a text")
    return value
