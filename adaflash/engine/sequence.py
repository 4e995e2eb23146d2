# SPDX-License-Identifier: Apache-2.0
"""One sample of a request on its way through the engine: its tokens, blocks and progress."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

from adaflash.cache.block_manager import ROOT_UID
from adaflash.request import Request


class ContextWrite(Enum):
    """When the drafter's context rows of a step's tokens are written: with the step, once it drafts again, or never."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


class Sequence:
    """Host state of one sample; the scheduler moves it, the engine commits tokens to it.

    Read several times per sequence and step, hence slots and counters instead of derived lengths.

    Args:
        key: Unique number of the sequence for the engine's lifetime.
        request: The request it belongs to.
        sample_index: Which of the request's n samples.
        max_output_tokens: `max_tokens`, cut to what the context limit leaves.

    Attributes:
        token_ids: Prompt, then committed output.
        num_tokens: Length of `token_ids`.
        num_prompt_tokens: Tokens of the prompt.
        block_table: KV blocks in order; covers at least the computed tokens.
        num_computed: Leading tokens whose target KV is written. The first token without KV is the anchor.
        has_drafter_kv: Whether the drafter's KV is valid for all computed tokens but the pending ones.
        num_pending: Last computed tokens whose drafter KV is still to be written.
        drafter_version: Version that drafts for it and writes its drafter KV.
        context_id: Of the weights that write its drafter KV; versions may share them (`Drafter.context_id`).
        context_start: Computed tokens when those weights took over: rows before it are another's.
        is_context_pure: Whether they wrote all its drafter KV.
        is_captured: Whether it becomes a trajectory for a trainer.
        is_compared: Whether its drafts decide about a version on trial.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache at admission.
        num_registered: Leading blocks already offered to the prefix cache.
        last_uid: Prefix-cache identity of the last registered block.
        num_preemptions: Times its KV was given up.
    """

    __slots__ = (
        "block_table",
        "context_id",
        "context_start",
        "drafter_version",
        "has_drafter_kv",
        "is_captured",
        "is_compared",
        "is_context_pure",
        "key",
        "last_uid",
        "max_output_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered",
        "num_tokens",
        "request",
        "sample_index",
        "token_ids",
    )

    def __init__(self, key: int, request: Request, sample_index: int, max_output_tokens: int) -> None:
        self.key = key
        self.request = request
        self.sample_index = sample_index
        self.max_output_tokens = max_output_tokens
        self.token_ids = list(request.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens = len(self.token_ids)
        self.block_table: list[int] = []
        self.num_computed = 0
        self.has_drafter_kv = True
        self.num_pending = 0
        self.drafter_version = 0
        self.context_id = self.context_start = 0
        self.is_context_pure = True
        self.is_captured = False
        self.is_compared = False
        self.num_cached_tokens = 0
        self.num_registered = 0
        self.last_uid = ROOT_UID
        self.num_preemptions = 0

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens without target KV; 1 when only the anchor is missing."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the anchor has no KV and the output has begun: the state a draft starts from."""
        return self.num_computed == self.num_tokens - 1 and self.num_tokens > self.num_prompt_tokens

    def move_to_drafter(self, version: int, context_id: int) -> None:
        """Let another version draft from here on; the rows that are there stay."""
        self.drafter_version = version
        if context_id != self.context_id:
            self.context_id, self.context_start = context_id, self.num_computed
            self.is_context_pure = self.num_computed == 0

    def append(self, token_ids: list[int]) -> None:
        """Commit output tokens."""
        self.token_ids += token_ids
        self.num_tokens += len(token_ids)


def max_step_s(decoding: Iterable[Sequence]) -> float:
    """Return the longest step that the requests of `decoding` allow; infinite when none of them has a limit."""
    limits = (seq.request.params.max_inter_token_ms for seq in decoding)
    return min((limit / 1000 for limit in limits if limit is not None), default=math.inf)
