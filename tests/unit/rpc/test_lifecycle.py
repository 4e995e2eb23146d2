# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio

import pytest

from adaflash.rpc.lifecycle import SignalWatch, finish_unless_signalled
from tests.serving import run


def test_work_that_ends_is_waited_for_and_its_error_is_raised() -> None:
    async def scenario() -> None:
        async def fail() -> None:
            raise ValueError("no")

        assert await finish_unless_signalled(asyncio.sleep(0), SignalWatch())
        with pytest.raises(ValueError, match="no"):
            await finish_unless_signalled(fail(), SignalWatch())

    run(scenario())


def test_a_signal_cancels_the_work_and_waits_for_what_it_tidies_up() -> None:
    tidied = []

    async def scenario() -> None:
        watch, started = SignalWatch(), asyncio.Event()

        async def work() -> None:
            try:
                started.set()
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                tidied.append(True)

        starting = asyncio.create_task(finish_unless_signalled(work(), watch))
        await started.wait()
        watch.first.set()
        assert not await starting
        assert tidied

    run(scenario())
