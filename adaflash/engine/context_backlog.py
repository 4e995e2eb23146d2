# SPDX-License-Identifier: Apache-2.0
"""Target features of tokens whose drafter context is not written yet.

While a sequence decodes plainly its drafter needs no context. Writing it row by row costs 2 to 3 % of a plain step
(demo model on a CPU); keeping the features costs a copy, and many rows are written at once when it drafts again.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_BYTES = 64 << 20
_MAX_ROWS = 8192


class ContextBacklog:
    """Rows of features by sequence, in the order of their tokens, in a fixed amount of device memory.

    Args:
        taps_size: Features of the tapped layers together.
        dtype: Of the features.
        device: Where they are computed.
        min_rows: Rows that there must be memory for: the most sequences in a step.
        max_bytes: Memory for more rows than that.

    Attributes:
        num_rows: Rows that there is memory for.
    """

    def __init__(
        self, taps_size: int, dtype: torch.dtype, device: torch.device, min_rows: int, max_bytes: int = _MAX_BYTES
    ) -> None:
        self.num_rows = max(min_rows, min(_MAX_ROWS, max_bytes // (taps_size * dtype.itemsize)))
        self._rows = torch.empty(self.num_rows, taps_size, dtype=dtype, device=device)
        self._free = list(range(self.num_rows - 1, -1, -1))
        self._taken: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Rows that can be added."""
        return len(self._free)

    def add(self, keys: list[int], taps: Tensor) -> None:
        """Keep the next token of each sequence.

        Args:
            keys: n different sequences, n <= `num_free`.
            taps: [n, taps_size].
        """
        assert len(keys) <= len(self._free), "there is room"
        rows = [self._free.pop() for _ in keys]
        self._rows[torch.tensor(rows, device=self._rows.device)] = taps
        for key, row in zip(keys, rows, strict=True):
            self._taken.setdefault(key, []).append(row)

    def take(self, keys: list[int]) -> Tensor:
        """Return the rows of these sequences end to end, and forget them."""
        rows = [row for key in keys for row in self._taken.pop(key)]
        self._free += reversed(rows)
        return self._rows[torch.tensor(rows, device=self._rows.device)]

    def drop(self, key: int) -> None:
        """Forget a sequence's rows, if it has any."""
        self._free += reversed(self._taken.pop(key, []))
