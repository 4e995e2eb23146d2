# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from adaflash.training.record_ids import MAX_RECORD_IDS, RecordIds


def test_the_ids_not_used_for_longest_are_forgotten() -> None:
    ids = RecordIds(["a", "b", "c"], max_ids=3)
    assert "a" in ids
    ids.add("d")
    assert [name in ids for name in "abcd"] == [True, False, True, True]
    ids.add("a")
    ids.add("e")
    assert "c" not in ids
    assert len(ids) == 3


def test_a_hundred_thousand_ids_are_remembered() -> None:
    ids = RecordIds(map(str, range(MAX_RECORD_IDS + 5)))
    assert len(ids) == MAX_RECORD_IDS >= 100_000
    assert "4" not in ids
    assert "5" in ids
