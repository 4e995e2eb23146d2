# SPDX-License-Identifier: Apache-2.0
"""From what a user passes to a validated `Request`; touches no engine state, so any thread may do it."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral

from adaflash.engine.tokenizer import Tokenizer
from adaflash.errors import RequestError
from adaflash.request import ChatMessage, Prompt, Request, SamplingParams, check_prompt


class RequestPreparer:
    """Tokenizes prompts, validates parameters and resolves seeds.

    Args:
        tokenizer: None when the model has none: prompts are token ids then.
        vocab_size: Token ids must be below it.
        max_model_len: Prompts must be shorter.
        seed: Seeds requests that bring none, with their number.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._seed = seed
        self._numbers = itertools.count()

    def prepare(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Request:
        """Return a validated request.

        Raises:
            RequestError: Names the field, its value and what is allowed.
        """
        number = next(self._numbers)
        token_ids, text = self._tokenize(prompt)
        params.check_vocabulary(self._vocab_size)
        check_prompt(token_ids, self._vocab_size, self._max_model_len)
        if params.stop_strings and self._tokenizer is None:
            raise RequestError("stop", params.stop, "empty: this model has no tokenizer, use stop_token_ids")
        if params.seed is None:
            params = replace(params, seed=_mix_seed(self._seed, number))
        return Request(request_id or f"adaflash-{uuid.uuid4().hex}", token_ids, params, text, time.monotonic())

    def _tokenize(self, prompt: Prompt) -> tuple[list[int], str | None]:
        messages, token_ids = [], []
        if not isinstance(prompt, str):
            for item in prompt:
                if isinstance(item, ChatMessage):
                    messages.append(item)
                else:
                    token_ids.append(int(item) if isinstance(item, Integral) and not isinstance(item, bool) else item)
            if messages and token_ids:
                raise RequestError("prompt", prompt, "all token ids or all ChatMessage")
            if not messages:
                return token_ids, None
        if self._tokenizer is None:
            raise RequestError("prompt", type(prompt).__name__, "token ids: this model has no tokenizer")
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt), prompt
        return self._tokenizer.render_chat(messages), None


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or many prompts as a list; a list of ints or messages is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    prompt_list: list[Prompt] = []
    token_ids: list[int] = []
    messages: list[ChatMessage] = []
    for item in prompts:
        if isinstance(item, ChatMessage):
            messages.append(item)
        elif isinstance(item, (int, Integral)):
            token_ids.append(int(item))
        else:
            prompt_list.append(item)
    given = [kind for kind in (prompt_list, token_ids, messages) if kind]
    if len(given) > 1:
        raise RequestError("prompts", prompts, "one prompt, or a list of prompts")
    if token_ids:
        return [token_ids]
    return [messages] if messages else prompt_list


def as_params_list(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """Return one `SamplingParams` per prompt.

    Raises:
        RequestError: Neither one nor as many as prompts were given.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise RequestError("params", len(params), f"one, or as many as prompts ({num_prompts})")
    return list(params)


def _mix_seed(engine_seed: int, number: int) -> int:
    """Return a seed in [0, 2**63) for the engine's `number`-th request (splitmix64 finalizer)."""
    mask = 2**64 - 1
    z = (engine_seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
