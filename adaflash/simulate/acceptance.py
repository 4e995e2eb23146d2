# SPDX-License-Identifier: Apache-2.0
"""What the drafter would propose at every position of a request's answer, and how much of it is right.

A round anchored at response token i that verifies n drafts accepts min(n, num_matched[i]) and goes on at
i + accepted + 1. That is exact for greedy decoding, whose answers do not depend on the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from adaflash.errors import ConfigError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_REQUIRED = ("confidence", "num_matched", "num_anchors", "num_prompt_tokens")
_OPTIONAL = ("length_ratio",)


@dataclass(frozen=True)
class Answer:
    """One request's answer of A + 1 tokens; its rounds can be anchored at all but the last.

    Attributes:
        num_prompt_tokens: Tokens before the answer.
        confidence: [A, K] largest probability of each draft distribution, in [0, 1].
        num_matched: [A] leading drafts that are the answer's own tokens, in [0, K], whether verified or not.
        length_ratio: [A] the length head's (accepted + 1) / W; None without one.
    """

    num_prompt_tokens: int
    confidence: FloatArray
    num_matched: IntArray
    length_ratio: FloatArray | None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.num_matched) + 1


class Answers(Protocol):
    """Where the requests of a simulation get their answers from."""

    has_length_ratio: bool

    def __getitem__(self, index: int) -> Answer:
        """Return the answer of request `index`, any non-negative number: recorded ones repeat."""


class RepeatedAnswers:
    """Answers that a model gave, from a file of `write_answers`; requests take them in turns.

    Args:
        answers: At least one.
    """

    def __init__(self, answers: list[Answer]) -> None:
        assert answers, "there is an answer to repeat"
        self._answers = answers
        self.has_length_ratio = answers[0].length_ratio is not None

    def __getitem__(self, index: int) -> Answer:
        return self._answers[index % len(self._answers)]

    def __len__(self) -> int:
        return len(self._answers)


def write_answers(path: Path, answers: list[Answer]) -> None:
    """Write answers as an npz file that is replaced as a whole; either all or none have a length ratio."""
    ratios = [answer.length_ratio for answer in answers if answer.length_ratio is not None]
    assert len(ratios) in (0, len(answers)), "a drafter has a length head or none"
    arrays: dict[str, npt.NDArray[Any]] = {
        "confidence": np.concatenate([answer.confidence for answer in answers]).astype(np.float32),
        "num_matched": np.concatenate([answer.num_matched for answer in answers]).astype(np.int64),
        "num_anchors": np.array([len(answer.num_matched) for answer in answers], dtype=np.int64),
        "num_prompt_tokens": np.array([answer.num_prompt_tokens for answer in answers], dtype=np.int64),
    }
    if ratios:
        arrays["length_ratio"] = np.concatenate(ratios).astype(np.float32)
    unfinished = path.with_suffix(".tmp.npz")
    np.savez_compressed(unfinished, allow_pickle=False, **arrays)
    unfinished.replace(path)


def read_answers(path: Path, num_drafts: int, num_prompt_tokens: int | None = None) -> RepeatedAnswers:
    """Read a file of `write_answers`.

    Args:
        path: The file.
        num_drafts: K of the drafter that is simulated.
        num_prompt_tokens: Tokens before each answer; None takes what was recorded.

    Raises:
        ConfigError: The file cannot be read, is not such a file, or is of another K.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in (*_REQUIRED, *_OPTIONAL) if name in file}
    except (OSError, ValueError, BadZipFile) as error:
        raise ConfigError(f"traces={str(path)!r} cannot be read: {error}") from error
    _check(path, arrays, num_drafts)
    ends = np.cumsum(arrays["num_anchors"])
    ratio = arrays.get("length_ratio")
    answers = []
    for prompt, begin, end in zip(arrays["num_prompt_tokens"], ends - arrays["num_anchors"], ends, strict=True):
        part = slice(int(begin), int(end))
        answers.append(
            Answer(
                int(prompt) if num_prompt_tokens is None else num_prompt_tokens,
                arrays["confidence"][part].astype(np.float32),
                arrays["num_matched"][part].astype(np.int64),
                None if ratio is None else ratio[part].astype(np.float32),
            )
        )
    return RepeatedAnswers(answers)


def _check(path: Path, arrays: dict[str, npt.NDArray[Any]], num_drafts: int) -> None:
    missing = [name for name in _REQUIRED if name not in arrays]
    if missing:
        raise ConfigError(f"traces={str(path)!r} is invalid: lacks {', '.join(missing)}")
    confidence, matched, anchors = arrays["confidence"], arrays["num_matched"], arrays["num_anchors"]
    total = int(anchors.sum())
    shapes = {"confidence": (total, num_drafts), "num_matched": (total,), "num_prompt_tokens": anchors.shape}
    if "length_ratio" in arrays:
        shapes["length_ratio"] = (total,)
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ConfigError(f"traces={str(path)!r} is invalid: {name} has shape {arrays[name].shape}, not {shape}")
    if len(anchors) == 0 or bool((anchors < 1).any()):
        raise ConfigError(f"traces={str(path)!r} is invalid: every answer needs at least two tokens")
    if bool((matched < 0).any() | (matched > num_drafts).any()):
        raise ConfigError(f"traces={str(path)!r} is invalid: num_matched must be in [0, {num_drafts}]")
    if not bool(((confidence >= 0) & (confidence <= 1)).all()):
        raise ConfigError(f"traces={str(path)!r} is invalid: confidence must be in [0, 1]")
