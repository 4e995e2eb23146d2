# SPDX-License-Identifier: Apache-2.0
"""The asynchronous engine under cancellation, abort, overload, corrupt logits and internal failure."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import torch

from adaflash.config import EngineConfig
from adaflash.engine.async_engine import AsyncEngine
from adaflash.engine.engine import Engine
from adaflash.errors import CapacityError, RequestError, UnavailableError
from adaflash.request import RequestOutput, SamplingParams
from tests.engines import TinySetup, random_prompts, run_all, tiny_engine

PROMPTS = random_prompts(40, 97, 20, seed=7)
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
T = TypeVar("T")


@pytest.fixture(scope="module")
def setup(tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup("llama")


@pytest.fixture(scope="module")
def expected(setup: TinySetup) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in run_all(tiny_engine(setup, None), PROMPTS, PARAMS)]


CONFIG = EngineConfig(verify_policy="fixed", max_num_seqs=8, num_kv_blocks=60)


def _run(setup: TinySetup, body: Callable[[AsyncEngine, Engine], Awaitable[T]], max_num_waiting: int = 1000) -> T:
    engine = tiny_engine(setup, "random", CONFIG)

    async def main() -> T:
        client = AsyncEngine(CONFIG, max_num_waiting, engine=engine)
        try:
            return await body(client, engine)
        finally:
            await client.close()

    return asyncio.run(main())


async def _collect(client: AsyncEngine, prompt: list[int], request_id: str | None = None) -> list[RequestOutput]:
    return [delta async for delta in client.generate(prompt, PARAMS, request_id)]


def _tokens(deltas: list[RequestOutput]) -> list[int]:
    return [token_id for delta in deltas for output in delta.outputs for token_id in output.token_ids]


async def _wait_idle(client: AsyncEngine) -> None:
    for _ in range(500):
        stats = client.stats()
        if stats.num_running == stats.num_waiting == 0:
            break
        await asyncio.sleep(0.01)
    stats = client.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_total_blocks


def test_concurrent_streams_equal_plain_decoding(setup: TinySetup, expected: list[list[int]]) -> None:
    async def body(client: AsyncEngine, _: Engine) -> list[list[int]]:
        replies = await asyncio.gather(*(_collect(client, prompt) for prompt in PROMPTS))
        assert all(deltas[-1].finished and not any(d.finished for d in deltas[:-1]) for deltas in replies)
        return [_tokens(deltas) for deltas in replies]

    assert _run(setup, body) == expected


def test_a_storm_of_cancellations_leaks_nothing(setup: TinySetup, expected: list[list[int]]) -> None:
    """Tasks are cancelled anywhere, also while their request is being submitted; half go by `abort`."""
    rng = random.Random(0)

    async def one(client: AsyncEngine, number: int) -> bool:
        task = asyncio.create_task(_collect(client, PROMPTS[number % len(PROMPTS)], f"r{number}"))
        await asyncio.sleep(rng.random() * rng.choice([0, 0.002, 0.1]))
        if number % 2:
            task.cancel()
        else:
            await client.abort(f"r{number}")
        result = await asyncio.gather(task, return_exceptions=True)
        assert not isinstance(result[0], Exception), result[0]
        return True

    async def body(client: AsyncEngine, engine: Engine) -> list[int]:
        assert all(await asyncio.gather(*(one(client, number) for number in range(400))))
        await _wait_idle(client)
        assert not engine._samples
        assert not engine._requests
        return _tokens(await _collect(client, PROMPTS[0]))

    assert _run(setup, body) == expected[0]


def test_abort_ends_the_stream_with_a_reason(setup: TinySetup, expected: list[list[int]]) -> None:
    async def body(client: AsyncEngine, _: Engine) -> list[RequestOutput]:
        deltas = []
        async for delta in client.generate(PROMPTS[0], PARAMS, "mine"):
            deltas.append(delta)
            if len(deltas) == 1:
                assert await client.abort("mine")
        assert not await client.abort("mine")
        return deltas

    deltas = _run(setup, body)
    assert deltas[-1].outputs[0].finish_reason == "abort"
    assert _tokens(deltas) == expected[0][: len(_tokens(deltas))]


def test_a_full_server_refuses_and_recovers(setup: TinySetup) -> None:
    async def body(client: AsyncEngine, _: Engine) -> None:
        results = await asyncio.gather(*(_collect(client, p) for p in PROMPTS), return_exceptions=True)
        refused = [r for r in results if isinstance(r, CapacityError)]
        served = [r for r in results if isinstance(r, list)]
        assert len(refused) > 0
        assert len(served) >= 12
        assert len(refused) + len(served) == len(PROMPTS)
        assert all(error.retry_after_s > 0 for error in refused)
        assert len(_tokens(await _collect(client, PROMPTS[0]))) == PARAMS.max_tokens

    _run(setup, body, max_num_waiting=4)


def test_a_duplicate_id_is_refused_and_the_first_request_goes_on(setup: TinySetup, expected: list[list[int]]) -> None:
    async def body(client: AsyncEngine, _: Engine) -> list[int]:
        first = asyncio.create_task(_collect(client, PROMPTS[0], "same"))
        await asyncio.sleep(0)
        results = await asyncio.gather(first, _collect(client, PROMPTS[1], "same"), return_exceptions=True)
        assert isinstance(results[1], RequestError)
        assert isinstance(results[0], list)
        return _tokens(results[0])

    assert _run(setup, body) == expected[0]


def test_a_slow_reader_gets_everything_merged(setup: TinySetup, expected: list[list[int]]) -> None:
    async def body(client: AsyncEngine, _: Engine) -> list[RequestOutput]:
        deltas = []
        async for delta in client.generate(PROMPTS[2], PARAMS):
            deltas.append(delta)
            await _wait_idle(client)
        return deltas

    deltas = _run(setup, body)
    assert len(deltas) <= 2, "what was not read in time came as one delta"
    assert _tokens(deltas) == expected[2]


def test_corrupt_logits_end_only_their_own_request(setup: TinySetup, expected: list[list[int]]) -> None:
    engine = tiny_engine(setup, "random", CONFIG)
    target = engine._runner.target
    compute = target.compute_logits
    num_calls = 0

    def corrupt(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        logits = compute(hidden)
        if num_calls == 3:
            logits[0, 5] = float("nan")
        return logits

    target.compute_logits = corrupt  # type: ignore[method-assign]
    outputs = engine.generate(PROMPTS[:4], PARAMS)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons.count("error") == 1
    for output, want in zip(outputs, expected, strict=False):
        got = output.outputs[0].token_ids
        assert got == (want if output.outputs[0].finish_reason == "length" else want[: len(got)])
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks


def test_an_internal_failure_reaches_every_stream_and_later_calls(setup: TinySetup) -> None:
    async def body(client: AsyncEngine, engine: Engine) -> None:
        tasks = [asyncio.create_task(_collect(client, prompt)) for prompt in PROMPTS[:3]]
        await asyncio.sleep(0.05)

        def broken() -> list[RequestOutput]:
            raise RuntimeError("device lost")

        engine.step = broken  # type: ignore[method-assign]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(result, UnavailableError) for result in results)
        assert all(isinstance(result, (UnavailableError, list)) for result in results)
        with pytest.raises(UnavailableError, match="internal error"):
            await _collect(client, PROMPTS[0])

    _run(setup, body)


def test_drain_finishes_the_running_and_refuses_the_new(setup: TinySetup, expected: list[list[int]]) -> None:
    async def body(client: AsyncEngine, _: Engine) -> list[int]:
        running = asyncio.create_task(_collect(client, PROMPTS[0]))
        await asyncio.sleep(0.02)
        drained = asyncio.create_task(client.drain(30.0))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            await _collect(client, PROMPTS[1])
        assert await drained
        return _tokens(await running)

    assert _run(setup, body) == expected[0]


def test_drain_aborts_what_does_not_finish_in_time(setup: TinySetup) -> None:
    async def body(client: AsyncEngine, _: Engine) -> list[RequestOutput]:
        running = asyncio.create_task(_collect(client, PROMPTS[0]))
        await asyncio.sleep(0.02)
        assert not await client.drain(0.0)
        return await running

    assert _run(setup, body)[-1].outputs[0].finish_reason == "abort"


def test_an_id_used_again_right_after_its_stream_was_closed_gets_its_own_tokens(
    setup: TinySetup, expected: list[list[int]]
) -> None:
    """Deltas of the closed request may still be on their way when the next one of its name starts."""

    async def body(client: AsyncEngine, engine: Engine) -> None:
        for number in range(60):
            first, second = number % len(PROMPTS), (number + 7) % len(PROMPTS)
            stream = client.generate(PROMPTS[first], PARAMS, "same")
            async for _ in stream:
                break
            time.sleep(0.01)  # The engine thread goes on, and what it posts waits for the loop.
            await stream.aclose()
            assert _tokens(await _collect(client, PROMPTS[second], "same")) == expected[second]
        await _wait_idle(client)
        assert not client._streams
        assert not engine._requests

    _run(setup, body)


def test_a_refused_duplicate_does_not_touch_the_request_of_its_name(
    setup: TinySetup, expected: list[list[int]]
) -> None:
    async def body(client: AsyncEngine, _: Engine) -> list[int]:
        running = asyncio.create_task(_collect(client, PROMPTS[0], "same"))
        await asyncio.sleep(0.01)
        for _attempt in range(5):
            with pytest.raises(RequestError, match="request_id"):
                await _collect(client, PROMPTS[1], "same")
        return _tokens(await running)

    assert _run(setup, body) == expected[0]


def test_a_request_on_its_way_in_when_the_engine_fails_is_told(setup: TinySetup) -> None:
    async def body(client: AsyncEngine, engine: Engine) -> None:
        in_step, go_on = threading.Event(), threading.Event()

        def broken() -> list[RequestOutput]:
            in_step.set()
            go_on.wait()
            raise RuntimeError("device lost")

        engine.step = broken  # type: ignore[method-assign]
        first = asyncio.create_task(_collect(client, PROMPTS[0]))
        await asyncio.to_thread(in_step.wait)
        late = asyncio.create_task(_collect(client, PROMPTS[1]))
        await asyncio.sleep(0.1)  # Its submission waits for the step to end.
        go_on.set()
        results = await asyncio.wait_for(asyncio.gather(first, late, return_exceptions=True), 10.0)
        assert [type(result) for result in results] == [UnavailableError, UnavailableError]

    _run(setup, body)
