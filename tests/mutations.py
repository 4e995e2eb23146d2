# SPDX-License-Identifier: Apache-2.0
"""Small random damage to a message's bytes."""

from __future__ import annotations

import random


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Flip, insert, delete or repeat something once or twice."""
    mutated = bytearray(data)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(mutated) + 1)
        kind = rng.randrange(4)
        if kind == 0 and mutated:
            mutated[at % len(mutated)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            mutated[at:at] = rng.randbytes(rng.randint(1, 6))
        elif kind == 2:
            del mutated[at : at + rng.randint(1, 6)]
        else:
            mutated += mutated[at : at + 8]
    return bytes(mutated)
