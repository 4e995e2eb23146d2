# SPDX-License-Identifier: Apache-2.0
import asyncio
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adaflash.config import ServerConfig
from adaflash.errors import ConfigError, RequestError
from adaflash.request import SamplingParams
from adaflash.rpc.server import GrpcServer
from tests.fake_engine import FakeEngine
from tests.serving import run, serving


async def _scrape(address: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics") as reply:
            return reply.read().decode()

    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(get)):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


def test_the_engines_counters_are_exported_under_their_known_names():
    async def scenario():
        async with serving(metrics_port=0) as served:
            samples = await _scrape(served.server.metrics_address)
            plain = {name: values.get(()) for name, values in samples.items()}
            assert plain["vllm:spec_decode_num_drafts_total"] == 10
            assert plain["vllm:spec_decode_num_draft_tokens_total"] == 70
            assert plain["vllm:spec_decode_num_accepted_tokens_total"] == 25
            assert plain["vllm:num_requests_running"] == plain["vllm:num_requests_waiting"] == 0
            assert plain["vllm:generation_tokens_total"] == 20
            assert plain["adaflash:acceptance_length"] == 3.5
            assert plain["adaflash:drafter_version"] == 3
            positions = samples["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
            assert [positions[("position", str(k)),] for k in range(4)] == [10, 8, 5, 2]
            assert samples["adaflash:step_seconds_total"][("part", "verify"),] == 1.5

    run(scenario())


def test_calls_are_counted_by_outcome_and_first_tokens_are_timed():
    async def scenario():
        async with serving(metrics_port=0) as served:
            await served.client.generate("a", SamplingParams(max_tokens=2))
            async for _ in served.client.generate_stream("a", SamplingParams(max_tokens=2)):
                pass
            with pytest.raises(RequestError):
                await served.client.generate([])
            samples = await _scrape(served.server.metrics_address)
            calls = samples["adaflash:rpc_calls_total"]
            unary, stream = "/adaflash.v1.Generation/Generate", "/adaflash.v1.Generation/GenerateStream"
            assert calls[("code", "OK"), ("method", unary)] == 1
            assert calls[("code", "OK"), ("method", stream)] == 1
            assert calls[("code", "INVALID_ARGUMENT"), ("method", unary)] == 1
            assert samples["vllm:time_to_first_token_seconds_count"][()] == 2
            assert samples["vllm:e2e_request_latency_seconds_count"][()] == 2

    run(scenario())


def test_a_metrics_port_in_use_is_named():
    async def scenario():
        async with serving(metrics_port=0) as served:
            port = int(served.server.metrics_address.rpartition(":")[2])
            server = GrpcServer(FakeEngine(), ServerConfig(grpc_port=0, metrics_port=port))
            with pytest.raises(ConfigError, match=f"metrics_port={port}"):
                await server.start()
            await server.stop()

    run(scenario())
