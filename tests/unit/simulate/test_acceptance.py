# SPDX-License-Identifier: Apache-2.0
"""Files of recorded answers are read back as they were written, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaflash.errors import ConfigError
from adaflash.simulate.acceptance import Answer, read_answers, write_answers

NUM_DRAFTS = 3


def answer(num_anchors: int, has_head: bool, seed: int) -> Answer:
    rng = np.random.default_rng(seed)
    return Answer(
        10 + seed,
        rng.random((num_anchors, NUM_DRAFTS)).astype(np.float32),
        rng.integers(0, NUM_DRAFTS + 1, num_anchors),
        rng.random(num_anchors).astype(np.float32) if has_head else None,
    )


@pytest.mark.parametrize("has_head", [True, False])
def test_answers_are_read_as_they_were_written(tmp_path: Path, has_head: bool) -> None:
    written = [answer(num_anchors, has_head, seed) for seed, num_anchors in enumerate((5, 1, 8))]
    write_answers(tmp_path / "traces.npz", written)
    read = read_answers(tmp_path / "traces.npz", NUM_DRAFTS)
    assert read.has_length_ratio is has_head
    for index, original in enumerate((*written, *written)):  # Requests beyond the last repeat them.
        assert read[index].num_prompt_tokens == original.num_prompt_tokens
        assert read[index].num_tokens == len(original.num_matched) + 1
        assert np.array_equal(read[index].confidence, original.confidence)
        assert np.array_equal(read[index].num_matched, original.num_matched)
        if original.length_ratio is not None:
            assert np.array_equal(read[index].length_ratio, original.length_ratio)


def test_prompts_can_be_given_another_length(tmp_path: Path) -> None:
    write_answers(tmp_path / "traces.npz", [answer(4, False, 0)])
    assert read_answers(tmp_path / "traces.npz", NUM_DRAFTS, num_prompt_tokens=99)[0].num_prompt_tokens == 99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_matched": None}, "lacks num_matched"),
        ({"num_matched": np.full(4, 4)}, r"num_matched must be in \[0, 3\]"),
        ({"num_matched": np.full(3, 0)}, r"num_matched has shape \(3,\), not \(4,\)"),
        ({"confidence": np.full((4, 3), np.nan)}, r"confidence must be in \[0, 1\]"),
        ({"confidence": np.full((4, 7), 0.5)}, r"confidence has shape \(4, 7\), not \(4, 3\)"),
        ({"length_ratio": np.zeros(5)}, r"length_ratio has shape \(5,\), not \(4,\)"),
        ({"num_anchors": np.array([4, 0]), "num_prompt_tokens": np.array([1, 1])}, "at least two tokens"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arrays = {
        "confidence": np.full((4, NUM_DRAFTS), 0.5),
        "num_matched": np.zeros(4, dtype=np.int64),
        "num_anchors": np.array([4]),
        "num_prompt_tokens": np.array([7]),
        **change,
    }
    np.savez(tmp_path / "traces.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ConfigError, match=message):
        read_answers(tmp_path / "traces.npz", NUM_DRAFTS)


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 not a zip")
    for name in ("missing.npz", "damaged.npz"):
        with pytest.raises(ConfigError, match=f"traces='.*{name}' cannot be read"):
            read_answers(tmp_path / name, NUM_DRAFTS)
