# SPDX-License-Identifier: Apache-2.0
"""Replay of recorded trajectories, against rounds that are known because the trajectory was made of served drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from adaflash.errors import ConfigError
from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_loader import load_drafter
from adaflash.training import replay as replay_module
from adaflash.training.blocks import TrainingSequence
from adaflash.training.replay import ReplayResult, replay
from tests.conftest import TinyModelBuilder
from tests.tiny_drafters import TinyDrafterBuilder
from tests.unit.training.served_blocks import serve_block

NUM_PROMPT_TOKENS = 4
NUM_DRAFTS = 3
ACCEPTED = (3, 0, 2, 1, 3, 3, 0, 0, 1, 2, 3)
"""Drafts each round of the trajectory accepts; the last round ends it with a bonus token."""
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "reduced_vocabulary": {"draft_vocab_size": 31},
    "sliding": {"config": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}},
}


class Recorded(NamedTuple):
    """A trajectory, its features, and the blocks that serving drafts at its anchors."""

    sequence: TrainingSequence
    taps: Tensor
    anchors: list[int]
    drafts: list[list[int]]
    confidence: list[list[float]]

    def without_last(self, num_tokens: int) -> Recorded:
        """The same with its last tokens cut off."""
        sequence = TrainingSequence(*(part[:-num_tokens] for part in self.sequence))
        return self._replace(sequence=sequence, taps=self.taps[:-num_tokens])


@pytest.fixture(params=VARIANTS)
def drafter(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_qwen3: TinyModelBuilder, tiny_drafter: TinyDrafterBuilder
) -> DFlashDrafter:
    return build_drafter(tmp_path, tiny_qwen3, tiny_drafter, VARIANTS[request.param])


@pytest.fixture
def plain(tmp_path: Path, tiny_qwen3: TinyModelBuilder, tiny_drafter: TinyDrafterBuilder) -> DFlashDrafter:
    return build_drafter(tmp_path, tiny_qwen3, tiny_drafter, {})


def build_drafter(
    directory: Path, tiny_qwen3: TinyModelBuilder, tiny_drafter: TinyDrafterBuilder, options: dict[str, Any]
) -> DFlashDrafter:
    tiny_qwen3(directory / "target")
    target = load_target(directory / "target", Backend("cpu"))
    checkpoint = tiny_drafter(directory / "drafter", directory / "target", **options)
    return load_drafter(checkpoint, target, target.backend)


def record(drafter: DFlashDrafter, accepted: tuple[int, ...] = ACCEPTED) -> Recorded:
    """A trajectory in which round i accepts accepted[i] drafts and then emits a token that was not drafted."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = NUM_PROMPT_TOKENS + 1 + sum(accepted) + len(accepted)
    taps = torch.randn(num_tokens - 1, len(drafter.tap_layer_ids) * drafter.config.hidden_size, generator=generator)
    token_ids = list(range(NUM_PROMPT_TOKENS + 1))
    recorded = Recorded(TrainingSequence(torch.empty(0), torch.empty(0)), taps, [], [], [])
    for count in accepted:
        anchor = len(token_ids) - 1
        block = serve_block(drafter, taps, anchor, token_ids[-1])
        drafts = block.token_ids[0].tolist()
        recorded.anchors.append(anchor)
        recorded.drafts.append(drafts)
        recorded.confidence.append(block.confidence[0].tolist())
        bonus = 5 if count == NUM_DRAFTS else (drafts[count] + 1) % 90
        token_ids += [*drafts[:count], bonus]
    mask = torch.arange(num_tokens) >= NUM_PROMPT_TOKENS
    return recorded._replace(sequence=TrainingSequence(torch.tensor(token_ids), mask))


def at_least(lens: list[int]) -> tuple[int, ...]:
    """How many of the lengths reach position 1, 2, .. K."""
    return tuple(sum(length >= k for length in lens) for k in range(1, NUM_DRAFTS + 1))


def test_rounds_are_those_the_trajectory_was_made_of(drafter: DFlashDrafter) -> None:
    recorded = record(drafter)
    result = replay(drafter, recorded.sequence, recorded.taps, max_output_tokens=1000)
    assert result.num_rounds == len(ACCEPTED)
    assert result.num_emitted_tokens == sum(ACCEPTED) + len(ACCEPTED)
    assert result.num_accepted_per_position == at_least(list(ACCEPTED))
    assert result.num_verified_per_position == (len(ACCEPTED),) * NUM_DRAFTS
    assert result.num_accepted_tokens == sum(ACCEPTED)
    assert result.num_verified_tokens == NUM_DRAFTS * len(ACCEPTED)
    assert result.acceptance_length == pytest.approx(1 + sum(ACCEPTED) / len(ACCEPTED))


def test_drafts_at_every_anchor_are_those_of_serving(drafter: DFlashDrafter) -> None:
    recorded = record(drafter)
    token_ids = recorded.sequence.token_ids
    result = replay(drafter, recorded.sequence, recorded.taps)
    anchors = range(NUM_PROMPT_TOKENS, len(token_ids) - 1)
    served = [serve_block(drafter, recorded.taps, a, int(token_ids[a])).token_ids for a in anchors]
    assert torch.equal(result.draft_token_ids, torch.cat(served))


@pytest.mark.parametrize("anchors_per_call", [1, 4])
def test_calls_of_any_size_give_the_same(
    plain: DFlashDrafter, monkeypatch: pytest.MonkeyPatch, anchors_per_call: int
) -> None:
    recorded = record(plain)
    whole = replay(plain, recorded.sequence, recorded.taps)
    monkeypatch.setattr(replay_module, "ANCHORS_PER_CALL", anchors_per_call)
    monkeypatch.setattr(replay_module, "CHUNK_ELEMENTS", 200)
    parts = replay(plain, recorded.sequence, recorded.taps)
    assert torch.equal(parts.draft_token_ids, whole.draft_token_ids)
    assert parts.num_accepted_per_position == whole.num_accepted_per_position


@pytest.mark.parametrize("max_verified", [1, 2])
def test_no_more_drafts_are_verified_than_allowed(plain: DFlashDrafter, max_verified: int) -> None:
    """Rounds that stop early leave the anchors the trajectory was made at; what follows them is drafted anew."""
    recorded = record(plain)
    result = replay(plain, recorded.sequence, recorded.taps, max_verified=max_verified, max_output_tokens=1000)
    drafts = result.draft_token_ids.tolist()
    response = recorded.sequence.token_ids[NUM_PROMPT_TOKENS:].tolist()
    anchor, accepted = 0, []
    while anchor < len(response) - 1:
        count = 0
        while count < max_verified and response[anchor + count + 1 : anchor + count + 2] == [drafts[anchor][count]]:
            count += 1
        accepted.append(count)
        anchor += count + 1
    assert result.num_accepted_per_position == at_least(accepted)[:max_verified]
    assert result.draft_token_ids.shape[1] == max_verified
    assert result.num_rounds == len(accepted)
    assert result.num_verified_tokens == max_verified * len(accepted)
    assert result.num_accepted_tokens > 0


def test_a_threshold_verifies_the_drafts_that_are_likely_to_survive(plain: DFlashDrafter) -> None:
    recorded = record(plain, (0,) * 12)  # so that the anchors do not depend on what was verified
    survival = torch.tensor(recorded.confidence).cumprod(1)
    threshold = float(survival[:, 1].median())
    lens = [int((row >= threshold).sum()) for row in survival]
    assert len(set(lens)) > 1
    result = replay(plain, recorded.sequence, recorded.taps, threshold=threshold, max_output_tokens=1000)
    assert result.num_verified_per_position == at_least(lens)
    assert result.num_accepted_tokens == 0
    assert result.num_rounds == 12


def test_a_threshold_that_nothing_meets_is_plain_decoding(plain: DFlashDrafter) -> None:
    recorded = record(plain)
    result = replay(plain, recorded.sequence, recorded.taps, threshold=1.0)
    assert result.num_verified_tokens == result.num_accepted_tokens == 0
    assert result.acceptance_length == 1.0


def test_the_end_of_the_response_cuts_the_last_block(plain: DFlashDrafter) -> None:
    """Cut within the last round, which accepted three: two of them are left, and no bonus token."""
    recorded = record(plain).without_last(2)
    result = replay(plain, recorded.sequence, recorded.taps)
    assert result.num_rounds == len(ACCEPTED)
    assert result.num_emitted_tokens == sum(ACCEPTED) + len(ACCEPTED) - 2
    assert result.num_accepted_tokens == sum(ACCEPTED) - 1
    assert result.num_verified_per_position[2] == len(ACCEPTED) - 1


def test_the_last_token_under_a_limit_is_a_bonus_token(plain: DFlashDrafter) -> None:
    recorded = record(plain).without_last(2)
    num_output_tokens = int(recorded.sequence.response_mask.sum())
    result = replay(plain, recorded.sequence, recorded.taps, max_output_tokens=num_output_tokens)
    assert result.num_rounds == len(ACCEPTED)
    assert result.num_emitted_tokens == sum(ACCEPTED) + len(ACCEPTED) - 2
    assert result.num_accepted_tokens == sum(ACCEPTED) - 2
    assert result.num_verified_per_position[1:] == (len(ACCEPTED) - 1,) * 2


def test_no_draft_past_the_positions_of_the_drafter(plain: DFlashDrafter) -> None:
    recorded = record(plain)
    width, boundary = NUM_DRAFTS + 1, recorded.anchors[4]
    plain.max_position_embeddings = boundary + width
    result = replay(plain, recorded.sequence, recorded.taps)
    num_plain = len(recorded.sequence.token_ids) - 1 - (boundary + ACCEPTED[4] + 1)
    assert result.num_rounds == 5 + num_plain
    assert result.num_accepted_tokens == sum(ACCEPTED[:5])
    assert result.num_verified_tokens == 5 * NUM_DRAFTS
    drafted = (result.draft_token_ids >= 0).all(dim=1)
    assert drafted.sum() == boundary - NUM_PROMPT_TOKENS + 1
    assert (result.draft_token_ids[~drafted] == -1).all()


@pytest.mark.parametrize("num_output_tokens", [0, 1])
def test_a_response_without_a_second_token_has_no_round(plain: DFlashDrafter, num_output_tokens: int) -> None:
    token_ids = torch.arange(6)
    sequence = TrainingSequence(token_ids, token_ids >= 6 - num_output_tokens)
    result = replay(plain, sequence, torch.randn(5, len(plain.tap_layer_ids) * plain.config.hidden_size))
    assert (result.num_rounds, result.num_emitted_tokens, result.acceptance_length) == (0, 0, 0.0)
    assert result.num_verified_per_position == (0,) * NUM_DRAFTS
    assert result.draft_token_ids.shape == (0, NUM_DRAFTS)


def test_results_of_sequences_add_up(plain: DFlashDrafter) -> None:
    parts = [record(plain), record(plain, (1, 3))]
    results = [replay(plain, part.sequence, part.taps) for part in parts]
    total = ReplayResult.total(results)
    assert total.num_rounds == len(ACCEPTED) + 2
    assert total.num_emitted_tokens == sum(result.num_emitted_tokens for result in results)
    assert total.num_accepted_per_position == at_least([*ACCEPTED, 1, 3])
    assert len(total.draft_token_ids) == sum(len(result.draft_token_ids) for result in results)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_verified": 0}, r"max_verified=0 is invalid: must be in \[1, 3\]"),
        ({"max_verified": 4}, r"max_verified=4 is invalid"),
        ({"threshold": 1.5}, r"threshold=1.5 is invalid: must be in \[0, 1\]"),
        ({"max_output_tokens": 3}, r"max_output_tokens=3 is invalid: must be >= 30"),
    ],
)
def test_bad_arguments_are_named(plain: DFlashDrafter, options: dict[str, Any], message: str) -> None:
    recorded = record(plain)
    with pytest.raises(ConfigError, match=message):
        replay(plain, recorded.sequence, recorded.taps, **options)


def test_the_response_must_end_the_sequence(plain: DFlashDrafter) -> None:
    recorded = record(plain)
    recorded.sequence.response_mask[-1] = False
    with pytest.raises(AssertionError, match="one run that ends the sequence"):
        replay(plain, recorded.sequence, recorded.taps)
