# SPDX-License-Identifier: Apache-2.0
"""The ids of the trajectories that were taken last, so that one sent twice is taken once."""

from __future__ import annotations

from collections.abc import Iterable

# About 20 MB; far more than servers can have on their way.
MAX_RECORD_IDS = 131_072


class RecordIds:
    """A set that forgets what was added or looked up longest ago.

    Args:
        record_ids: What it holds at first, oldest first.
        max_ids: Most ids it holds.
    """

    def __init__(self, record_ids: Iterable[str] = (), max_ids: int = MAX_RECORD_IDS) -> None:
        self._max_ids = max_ids
        self._ids: dict[str, None] = {}  # in the order of their last use
        for record_id in record_ids:
            self.add(record_id)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, record_id: str) -> bool:
        if record_id not in self._ids:
            return False
        self._ids[record_id] = self._ids.pop(record_id)
        return True

    def add(self, record_id: str) -> None:
        """Add an id, or note that it was used again."""
        self._ids.pop(record_id, None)
        self._ids[record_id] = None
        if len(self._ids) > self._max_ids:
            del self._ids[next(iter(self._ids))]
