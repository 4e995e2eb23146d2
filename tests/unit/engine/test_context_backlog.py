# SPDX-License-Identifier: Apache-2.0
"""Features that wait: in the order of their tokens, in a fixed amount of memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adaflash.engine.context_backlog import ContextBacklog

SIZE = 3


@pytest.fixture
def backlog() -> ContextBacklog:
    return ContextBacklog(SIZE, torch.float32, torch.device("cpu"), min_rows=1, max_bytes=4 * SIZE * 4)


def rows(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, SIZE)


def test_rows_come_back_in_the_order_of_their_tokens(backlog: ContextBacklog) -> None:
    backlog.add([7, 8], rows(1, 2))
    backlog.add([8, 7], rows(3, 4))
    assert backlog.num_free == 0
    assert backlog.take([7, 8])[:, 0].tolist() == [1, 4, 2, 3]
    assert backlog.num_free == 4


def test_rows_that_are_taken_or_dropped_make_room(backlog: ContextBacklog) -> None:
    for value in range(40):
        backlog.add([1, 2], rows(value, -value))
        assert backlog.take([1])[:, 0].tolist() == [value]
        backlog.drop(2)
        backlog.drop(2)
        assert backlog.num_free == 4


def test_what_was_taken_does_not_change(backlog: ContextBacklog) -> None:
    backlog.add([1], rows(5))
    taken = backlog.take([1])
    backlog.add([2], rows(6))
    assert taken[:, 0].tolist() == [5]


def test_more_rows_than_there_is_room_for_are_an_error(backlog: ContextBacklog) -> None:
    with pytest.raises(AssertionError, match="room"):
        backlog.add([1, 2, 3, 4, 5], rows(1, 2, 3, 4, 5))


def test_there_is_room_for_a_step_whatever_the_memory() -> None:
    assert ContextBacklog(SIZE, torch.float32, torch.device("cpu"), min_rows=9, max_bytes=1).num_rows == 9
