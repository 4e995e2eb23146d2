# SPDX-License-Identifier: Apache-2.0
"""One sample of a request on its way through the engine: its tokens, blocks and progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from adaflash.cache.block_manager import ROOT_UID
from adaflash.request import Request


@dataclass(eq=False)
class Sequence:
    """Host state of one sample; the scheduler moves it, the engine commits tokens to it.

    Attributes:
        key: Unique number of the sequence for the engine's lifetime.
        request: The request it belongs to.
        sample_index: Which of the request's n samples.
        token_ids: Prompt, then committed output.
        max_output_tokens: `max_tokens`, cut to what the context limit leaves.
        block_table: KV blocks in order; covers at least the computed tokens.
        num_computed: Leading tokens whose target KV is written. The first token without KV is the anchor.
        has_drafter_kv: Whether the drafter's KV is valid for all computed tokens.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache at admission.
        num_registered: Leading blocks already offered to the prefix cache.
        last_uid: Prefix-cache identity of the last registered block.
        num_preemptions: Times its KV was given up.
    """

    key: int
    request: Request
    sample_index: int
    token_ids: list[int]
    max_output_tokens: int
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    has_drafter_kv: bool = True
    num_cached_tokens: int = 0
    num_registered: int = 0
    last_uid: int = ROOT_UID
    num_preemptions: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens without target KV; 1 when only the anchor is missing."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        """The committed output."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def is_decoding(self) -> bool:
        """Whether only the anchor has no KV and the output has begun: the state a draft starts from."""
        return self.num_computed == len(self.token_ids) - 1 and self.num_output_tokens > 0
