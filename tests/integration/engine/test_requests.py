# SPDX-License-Identifier: Apache-2.0
"""What happens to requests around the step: memory of the waiting, failed batches, unusual token types."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.errors import RequestError
from adaflash.request import SamplingParams
from tests.engines import TinySetup, run_all, tiny_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine(tiny_setup: Callable[[str], TinySetup]) -> Engine:
    return tiny_engine(tiny_setup("llama"), "random", EngineConfig(num_kv_blocks=60, max_num_seqs=4))


def test_waiting_samples_hold_no_penalty_memory(engine: Engine) -> None:
    """A tensor row per sample of every waiting request would let one client fill the memory."""
    penalised = SamplingParams(n=16, presence_penalty=0.5, max_tokens=3, seed=1, ignore_eos=True)
    for number in range(10):
        engine.add_request([5 + number, 6], penalised)
    counts = engine._runner.sampling._penalties
    most = counts.output_counts.shape[0]
    while engine.has_unfinished():
        engine.step()
        most = max(most, counts.output_counts.shape[0])
    assert 0 < most <= 16
    assert counts.output_counts.shape[0] == 0, "the memory is given back"


def test_a_batch_that_fails_on_its_way_in_leaves_nothing_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine.submit

    def refuse_the_third(request):  # type: ignore[no-untyped-def]
        if len(engine._requests) == 2:
            raise RequestError("request_id", request.request_id, "unique among running requests")
        submit(request)

    monkeypatch.setattr(engine, "submit", refuse_the_third)
    with pytest.raises(RequestError):
        engine.generate([[5], [6], [7]], PARAMS)
    assert not engine.has_unfinished()
    monkeypatch.undo()
    assert len(run_all(engine, [[5], [6], [7]], PARAMS)) == 3


def test_a_users_id_never_collides_with_a_generated_one(engine: Engine) -> None:
    for number in range(5):
        engine.add_request([5], PARAMS, f"request-{number}")
    assert len(engine.generate([[3], [4]], PARAMS)) == 2


def test_numpy_token_ids_are_token_ids(engine: Engine) -> None:
    expected = engine.generate([3, 4, 5], PARAMS)[0].outputs[0].token_ids
    for prompt in (np.array([3, 4, 5]), [np.int64(3), np.int32(4), 5]):
        assert engine.generate(prompt, PARAMS)[0].outputs[0].token_ids == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("stop", 5), ("stop_token_ids", None), ("stop_token_ids", 7)])
def test_stop_conditions_of_a_wrong_type_are_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{field}="):
        SamplingParams(**{field: value})


def test_prompt_tokens_are_counted_when_the_prefill_is_done(tiny_setup: Callable[[str], TinySetup]) -> None:
    """And once: however many samples share it, and however often a preempted sample computes it again."""
    config = EngineConfig(num_kv_blocks=24, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    engine = tiny_engine(tiny_setup("llama"), "random", config)
    endless = SamplingParams(n=3, seed=1, max_tokens=40, ignore_eos=True)
    engine.add_request([5] * 20, endless, "a")
    for expected in (0, 0, 20):
        engine.step()
        assert engine.stats().num_prompt_tokens == expected
    while engine.has_unfinished():
        engine.step()
        assert engine.stats().num_prompt_tokens == 20
    assert engine.stats().num_preemptions > 0
    engine.add_request([5] * 20, endless, "b")
    engine.step()
    assert (engine.stats().num_prompt_tokens, engine.stats().num_cached_tokens) == (40, 19)


def test_a_prompt_whose_prefill_never_ended_is_not_counted(tiny_setup: Callable[[str], TinySetup]) -> None:
    engine = tiny_engine(
        tiny_setup("llama"), None, EngineConfig(num_kv_blocks=24, max_num_seqs=4, max_num_batched_tokens=8)
    )
    engine.add_request([5] * 20, PARAMS, "a")
    engine.step()
    engine.abort("a")
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_finished) == (0, 1)
