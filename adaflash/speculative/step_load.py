# SPDX-License-Identifier: Apache-2.0
"""What `goodput` is told of a step before it decides: who decodes, and what must run whoever drafts."""

from __future__ import annotations

import math
from typing import NamedTuple


class Candidate(NamedTuple):
    """A decoding sequence.

    Attributes:
        key: Its number.
        temperature_class: See `temperature_class`.
        drafter_version: What would draft for it.
        max_drafts: Most drafts it may verify; 0 when it cannot draft now.
        is_on_trial: Whether its drafts decide between two drafter versions: it drafts now and then whatever that costs.
    """

    key: int
    temperature_class: int
    drafter_version: int
    max_drafts: int
    is_on_trial: bool = False


class StepLoad(NamedTuple):
    """A step without its drafts.

    Attributes:
        num_seqs: Sequences of the step.
        num_decoding: Those that decode: each commits at least one token.
        num_tokens: Rows: an anchor of each decoding sequence, and prefill chunks.
        num_context: KV tokens of all sequences.
        max_step_s: Longest step that is allowed if plain decoding can do it; infinite without a limit.
    """

    num_seqs: int
    num_decoding: int
    num_tokens: int
    num_context: int
    max_step_s: float = math.inf
