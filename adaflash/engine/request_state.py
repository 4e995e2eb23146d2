# SPDX-License-Identifier: Apache-2.0
"""A request inside the engine: its samples, and what they have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from adaflash.engine.output import SampleOutput
from adaflash.engine.sequence import Sequence
from adaflash.request import Request, SpeculationStats
from adaflash.training.trajectories import RoundCounts


@dataclass(eq=False, slots=True)
class Sample:
    """One sample on its way: the scheduler's sequence and the stream of what it committed.

    Attributes:
        rounds: Its decode rounds so far; kept only if the sequence is captured.
    """

    seq: Sequence
    output: SampleOutput
    rounds: list[RoundCounts] = field(default_factory=list)


@dataclass
class RequestState:
    """A running request.

    Attributes:
        samples: By sample index.
        num_output_tokens: Committed tokens of all samples.
        unforked: Samples that start when the first one's prefill ends.
        num_unfinished: Samples whose output has not ended.
    """

    request: Request
    samples: list[Sample]
    stats: SpeculationStats
    unforked: list[Sequence]
    num_unfinished: int
    num_output_tokens: int = 0
