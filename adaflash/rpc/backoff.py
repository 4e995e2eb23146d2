# SPDX-License-Identifier: Apache-2.0
"""Waits longer and longer between attempts that fail."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """Doubles the wait from `initial_s` to `max_s`; each wait is drawn from its upper half, so that clients spread out.

    Args:
        initial_s: The longest first wait.
        max_s: The longest wait.
    """

    def __init__(self, initial_s: float, max_s: float) -> None:
        self._initial_s, self._max_s = initial_s, max_s
        self._next_s = initial_s

    def reset(self) -> None:
        """Begin again with the shortest wait: something succeeded."""
        self._next_s = self._initial_s

    async def wait(self) -> None:
        """Wait, and wait longer the next time."""
        wait_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._max_s)
        await asyncio.sleep(wait_s)
