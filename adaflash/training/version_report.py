# SPDX-License-Identifier: Apache-2.0
"""What a server tells its trainer about a version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VersionEvent = Literal["staged", "refused", "canary", "activated", "rolled_back", "bad"]

MAX_REASON_CHARS = 2000


@dataclass(frozen=True)
class VersionReport:
    """What became of a version on a server.

    Attributes:
        version: 0 is the drafter the server started with.
        event: What happened.
        acceptance_length: Mean tokens per round with it, bonus token included; 0 when not measured.
        num_rounds: Rounds that mean is over.
        num_verified_tokens: Drafts verified in them.
        num_accepted_tokens: Drafts accepted in them.
        reason: Why, in words; cut to MAX_REASON_CHARS on the way.
    """

    version: int
    event: VersionEvent
    acceptance_length: float = 0.0
    num_rounds: int = 0
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0
    reason: str = ""
