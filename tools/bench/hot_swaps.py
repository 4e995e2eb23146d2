# SPDX-License-Identifier: Apache-2.0
"""Swaps versions of the drafter under load, through a real trainer service and gRPC, and looks at what users see.

Versions go live at once, one after another; users check every reply against plain decoding's. Reported: failed
requests, replies with other tokens, replies stamped with a version that was not active at their dispatch, gaps between
deltas with and without swaps, and the process's memory over time.

Usage: python tools/bench/hot_swaps.py [--swaps N] [--users N] [--max-tokens N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from adaflash.cli.environment import environment
from adaflash.config import EngineConfig, OnlineConfig, ServerConfig
from adaflash.demo.drafter import demo_drafter_dir
from adaflash.demo.model import demo_model_dir
from adaflash.demo.prompts import demo_prompts
from adaflash.engine.async_engine import AsyncEngine
from adaflash.models.digest import target_digest
from adaflash.request import ChatMessage, Prompt, SamplingParams
from adaflash.rpc.client import GenerateClient
from adaflash.rpc.online import OnlineLearning
from adaflash.rpc.server import GrpcServer
from adaflash.rpc.trainer_server import TrainerServer
from adaflash.training.trajectories import Trajectory
from adaflash.training.version_directory import Publication
from adaflash.training.weight_store import WeightStore


@dataclass
class Phase:
    """What users saw in one phase.

    Attributes:
        num_requests: Replies.
        num_failed: Requests that ended with an error.
        num_different: Replies whose tokens are not plain decoding's.
        num_wrong_stamps: Replies drafted by a version that was neither active at dispatch nor became so until then.
        gaps_ms: Times between the deltas of a reply.
        memory_mb: Resident memory over time.
        num_swaps: Versions that went live.
    """

    num_requests: int = 0
    num_failed: int = 0
    num_different: int = 0
    num_wrong_stamps: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    num_swaps: int = 0

    def summary(self) -> dict[str, float]:
        """Return the counts, quantiles of the gaps, and how far memory went."""
        quantiles = np.percentile(self.gaps_ms, (50, 90, 99, 99.9))
        tenth = max(1, len(self.memory_mb) // 10)
        return {
            "requests": self.num_requests,
            "failed": self.num_failed,
            "different": self.num_different,
            "wrong_stamps": self.num_wrong_stamps,
            "swaps": self.num_swaps,
            **dict(zip(("gap_p50_ms", "gap_p90_ms", "gap_p99_ms", "gap_p99.9_ms"), quantiles.tolist(), strict=True)),
            "gap_max_ms": max(self.gaps_ms),
            "memory_first_mb": statistics.median(self.memory_mb[:tenth]),
            "memory_last_mb": statistics.median(self.memory_mb[-tenth:]),
        }


class Discard:
    """Takes trajectories and forgets them."""

    def take(self, trajectory: Trajectory) -> bool:
        """Take one."""
        return True

    def record_ids(self) -> tuple[str, ...]:
        """Return nothing: none is kept."""
        return ()


def write_version(seed: int) -> Callable[[Path], None]:
    """Return a writer of the shipped drafter with every weight moved by 1 %."""
    import torch

    def write(directory: Path) -> None:
        generator = torch.Generator().manual_seed(seed)
        tensors = load_file(demo_drafter_dir() / "model.safetensors")
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[name] = (tensor.float() * (1 + 0.01 * noise)).to(tensor.dtype)
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_bytes((demo_drafter_dir() / "config.json").read_bytes())

    return write


@asynccontextmanager
async def served(
    work: Path, users: int
) -> AsyncIterator[tuple[WeightStore, OnlineLearning, GenerateClient, AsyncEngine]]:
    """Run a trainer service and a server that learns from it."""
    digest = target_digest(demo_model_dir())
    store = WeightStore(work / "store", keep=2)
    trainer = TrainerServer(store, Discard(), digest, ServerConfig(grpc_port=0, max_message_bytes=256 << 20))
    await trainer.start()
    config = EngineConfig(device="cpu", max_model_len=512, max_num_seqs=users, verify_policy="confidence")
    online = OnlineLearning(
        OnlineConfig(trainer=trainer.address, online_dir=str(work / "server"), drain_timeout_s=1.0), config, "bench"
    )
    engine = await asyncio.to_thread(AsyncEngine, config, capture=online.capture)
    server = GrpcServer(engine, ServerConfig(grpc_port=0))
    await online.start(engine)
    assert online.manager is not None, "it has been started"
    online.manager.proven = 1 << 40  # every version goes live at once
    await server.start()
    try:
        async with GenerateClient(server.address) as client:
            yield store, online, client, engine
    finally:
        await server.stop()
        await engine.close()
        await online.close()
        await trainer.stop()
        store.close()


async def measure(
    num_swaps: int, seconds: float, users: int, max_tokens: int, work: Path
) -> tuple[Phase, Phase, float]:
    """Return a phase without swaps, one with them, and the median step of the first in milliseconds."""
    prompts: list[Prompt] = [[ChatMessage("user", p.prompt)] for p in demo_prompts()]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    async with served(work, users) as (store, online, client, engine):
        await engine.set_verify_policy("off")
        expected = [(await client.generate(prompt, params)).outputs[0].token_ids for prompt in prompts]
        await engine.set_verify_policy("confidence")
        numbers = itertools.count()
        manager = online.manager
        assert manager is not None, "it has been started"

        async def user(phase: Phase, is_over: Callable[[], bool]) -> None:
            while not is_over():
                index = next(numbers) % len(prompts)
                before = manager.active
                tokens: list[int] = []
                stamps: tuple[int, ...] = ()
                last = 0.0
                try:
                    async for delta in client.generate_stream(prompts[index], params):
                        now = time.perf_counter()
                        if last:
                            phase.gaps_ms.append(1e3 * (now - last))
                        last = now
                        tokens += delta.outputs[0].token_ids
                        stamps = delta.speculation.drafter_versions
                except Exception as error:  # noqa: BLE001 - counted and shown
                    phase.num_failed += 1
                    print("failed:", error)
                    continue
                phase.num_requests += 1
                phase.num_different += tokens != expected[index]
                # A request that outlasted its version went on with a newer one.
                in_order = list(stamps) == sorted(stamps)
                phase.num_wrong_stamps += not (in_order and before <= stamps[0] and stamps[-1] <= manager.active)

        async def watch(phase: Phase) -> None:
            while True:
                phase.memory_mb.append(_resident_mb())
                await asyncio.sleep(1.0)

        async def run(phase: Phase, is_over: Callable[[], bool]) -> None:
            watching = asyncio.create_task(watch(phase))
            await asyncio.gather(*(user(phase, is_over) for _ in range(users)))
            watching.cancel()

        still, swapping = Phase(), Phase()
        end = time.monotonic() + seconds
        steps, started = engine.stats().num_steps, time.perf_counter()
        await run(still, lambda: time.monotonic() > end)
        step_ms = 1e3 * (time.perf_counter() - started) / (engine.stats().num_steps - steps)

        async def swap() -> None:
            for seed in range(num_swaps):
                version = await asyncio.to_thread(store.publish, write_version(seed), _publication(online, seed))
                assert await manager.wait_for(version, 60.0), f"version {version} did not go live"
                swapping.num_swaps += 1
                if seed % 20 == 19:
                    print(f"  {seed + 1} swaps, {swapping.num_requests} replies, {_resident_mb():.0f} MB", flush=True)

        swaps = asyncio.create_task(swap())
        await run(swapping, swaps.done)
        await swaps
    return still, swapping, step_ms


def _publication(online: OnlineLearning, seed: int) -> Publication:
    return Publication(target_digest=online.capture.target_digest, train_step=seed)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the phase without swaps")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        still, swapping, step_ms = asyncio.run(
            measure(args.swaps, args.seconds, args.users, args.max_tokens, Path(work))
        )
    summaries = {"still": still.summary(), "swapping": swapping.summary()}
    print(f"{'':18s} {'still':>10s} {'swapping':>10s}    (mean step without swaps {step_ms:.0f} ms)")
    for name in summaries["still"]:
        print(f"{name:18s} {summaries['still'][name]:10.1f} {summaries['swapping'][name]:10.1f}")
    if args.json is not None:
        values = {"step_ms": step_ms, **summaries, "arguments": {**vars(args), "json": str(args.json)}}
        args.json.write_text(json.dumps({**values, "environment": environment()}, indent=1))


if __name__ == "__main__":
    main()
