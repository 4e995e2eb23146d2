# SPDX-License-Identifier: Apache-2.0
"""The trainer's service, called directly over loopback."""

from __future__ import annotations

import asyncio
import logging
import threading
import zlib
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from adaflash.rpc.client import ClientTls
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.rpc.trainer_convert import trajectory_to_pb
from adaflash.training.trajectories import RoundCounts, Trajectory, TrajectoryFeatures
from tests.serving import call_raw, eventually, run
from tests.trainers import ListSink, client_of, training
from tests.versions import TARGET_DIGEST, tiny_drafter

TOKEN = "trainer-token"
INFERENCE_KEY = "inference-key"
SERVICE = "/adaflash.v1.Trainer/"


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter(tmp_path_factory.mktemp("tiny"))


def trajectory(index: int = 0, **fields: Any) -> Trajectory:
    values: dict[str, Any] = {
        "request_id": f"r{index}",
        "sample_index": index,
        "token_ids": [5, 6, 7, 8, 9],
        "num_prompt_tokens": 2,
        "rounds": [RoundCounts(3, 1), RoundCounts(0, 0)],
        "drafter_version": 4,
        "target_digest": TARGET_DIGEST,
        "temperature": 0.7,
    }
    return Trajectory(**values | fields)


async def _code(awaitable: Any) -> tuple[grpc.StatusCode, str]:
    try:
        if hasattr(awaitable, "__aiter__"):
            async for _ in awaitable:
                pass
        else:
            await awaitable
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def _fetch(stub: Any, version: int, file: str, **fields: int) -> list[pb.FileChunk]:
    request = pb.FetchVersionRequest(version=version, file=file, **fields)
    return [chunk async for chunk in stub.FetchVersion(request)]


def test_trajectories_arrive_unchanged_and_are_counted(tmp_path: Path, drafter: Path) -> None:
    rng = np.random.default_rng(0)
    bfloat16 = (rng.standard_normal((4, 6)).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    exact = TrajectoryFeatures(bfloat16, bfloat16[:, :3])
    full = TrajectoryFeatures(rng.standard_normal((4, 6)).astype(np.float32), np.ones((4, 3), np.float32))
    sent = [trajectory(0), trajectory(1, features=exact), trajectory(2, features=full), trajectory(3, rounds=[])]

    async def scenario() -> None:
        sink = ListSink(capacity=3)
        async with training(tmp_path, drafter, sink) as trainer, trainer.stub() as stub:
            reply = await stub.SubmitTrajectories(trajectory_to_pb(record) for record in sent)
            assert (reply.num_received, reply.num_accepted, reply.num_dropped, reply.num_invalid) == (4, 3, 1, 0)
            status = await stub.GetStatus(pb.GetTrainerStatusRequest())
            assert status.trajectories == reply
        for record, taken in zip(sent[:3], sink.trajectories, strict=True):
            assert b"".join(record.to_buffers()) == b"".join(taken.to_buffers())

    run(scenario())
    assert trajectory_to_pb(sent[1]).features.dtype == "BF16"
    assert trajectory_to_pb(sent[2]).features.dtype == "F32"


def test_what_is_sent_twice_is_taken_once_and_what_was_dropped_may_come_again(tmp_path: Path, drafter: Path) -> None:
    records = [trajectory_to_pb(trajectory(index)) for index in range(4)]

    async def scenario() -> None:
        sink = ListSink(capacity=3)
        async with training(tmp_path, drafter, sink) as trainer, trainer.stub() as stub:
            reply = await stub.SubmitTrajectories(iter([*records, records[1]]))
            assert (reply.num_received, reply.num_accepted, reply.num_dropped, reply.num_duplicate) == (5, 3, 1, 1)
            sink.capacity = 100
            replies = await asyncio.gather(*(stub.SubmitTrajectories(iter(records)) for _ in range(8)))
            assert sum(reply.num_accepted for reply in replies) == 1
            assert sum(reply.num_duplicate for reply in replies) == 31
            status = await stub.GetStatus(pb.GetTrainerStatusRequest())
            assert (status.trajectories.num_accepted, status.trajectories.num_duplicate) == (4, 32)
        async with training(tmp_path, drafter, sink) as trainer, trainer.stub() as stub:
            reply = await stub.SubmitTrajectories(iter(records))
            assert (reply.num_accepted, reply.num_duplicate) == (0, 4)
        assert [taken.request_id for taken in sink.trajectories] == ["r0", "r1", "r2", "r3"]

    run(scenario())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.ClearField("token_ids"), "token_ids="),
        (lambda m: m.token_ids.append(2**31), "token_ids="),
        (lambda m: setattr(m, "num_prompt_tokens", 6), r"num_prompt_tokens=6 .* in \[1, 5\]"),
        (lambda m: setattr(m, "num_prompt_tokens", 0), "num_prompt_tokens=0"),
        (lambda m: m.rounds.num_accepted.append(0), "of one length"),
        (lambda m: m.rounds.num_verified.__setitem__(1, 0) or m.rounds.num_accepted.__setitem__(1, 1), r"rounds\[1\]"),
        (lambda m: setattr(m, "temperature", float("nan")), "temperature"),
        (lambda m: setattr(m, "drafter_version", 2**63), "drafter_version"),
        (lambda m: setattr(m, "target_digest", "other"), f"target_digest='other' .* {TARGET_DIGEST}"),
        (lambda m: setattr(m, "request_id", "x" * 300), "request_id"),
        (lambda m: setattr(m, "record_id", "x" * 65), "record_id=.* 1 to 64 characters"),
        (lambda m: m.ClearField("record_id"), "record_id=''"),
        (lambda m: setattr(m.features, "dtype", "F64"), "features.dtype='F64' .* one of F32, BF16"),
        (lambda m: setattr(m.features, "num_tokens", 3), "features.safetensors"),
        (lambda m: setattr(m.features, "num_tokens", 2**32 - 1), "features.safetensors"),
        (lambda m: setattr(m.features, "safetensors", m.features.safetensors[:-1]), "features.safetensors"),
        (lambda m: setattr(m.features, "safetensors", b""), "features.safetensors"),
        (
            lambda m: setattr(m.features, "safetensors", m.features.safetensors[:-4] + b"\0\0\xc0\x7f"),
            "NaN or infinity",
        ),
        (lambda m: m.token_ids.__delitem__(slice(2, None)), "features.num_tokens=4"),
    ],
)
def test_an_invalid_trajectory_is_counted_by_reason_and_the_others_are_taken(
    tmp_path: Path, drafter: Path, change: Any, words: str
) -> None:
    features = TrajectoryFeatures(np.full((4, 6), 1.1, np.float32), np.full((4, 3), 1.1, np.float32))
    message = trajectory_to_pb(trajectory(0, features=features))
    change(message)

    async def scenario() -> None:
        async with training(tmp_path, drafter) as trainer, trainer.stub() as stub:
            goods = [trajectory_to_pb(trajectory(1)) for _ in range(2)]
            reply = await stub.SubmitTrajectories(iter([goods[0], message, message, goods[1]]))
            assert (reply.num_received, reply.num_accepted, reply.num_invalid) == (4, 2, 2)
            assert len(trainer.sink.trajectories) == 2
            with pytest.raises(AssertionError, match=words):
                raise AssertionError(reply.first_invalid)

    run(scenario())


def test_a_subscriber_hears_of_the_newest_version_and_of_each_new_one(tmp_path: Path, drafter: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path, drafter) as trainer, trainer.stub() as stub:
            trainer.publish(1)
            trainer.publish(2, train_step=20)
            call = stub.SubscribeVersions(pb.SubscribeVersionsRequest(server_id="a", from_version=1))
            info = await call.read()
            stored = trainer.store.get(2)
            assert (info.version, info.train_step, info.kind) == (2, 20, pb.VERSION_KIND_FULL)
            assert (info.target_digest, info.layout_signature) == (TARGET_DIGEST, stored.manifest.layout_signature)
            assert info.num_bytes == sum(
                path.stat().st_size for path in stored.directory.iterdir() if path.name != "manifest.json"
            )
            await asyncio.to_thread(trainer.publish, 3)  # from another thread, as a trainer does
            assert (await call.read()).version == 3
            trainer.store.mark_bad(3, "poor")
            message = await call.read()
            assert (message.version, message.is_bad, message.bad_reason) == (3, True, "poor")
            later = stub.SubscribeVersions(pb.SubscribeVersionsRequest(server_id="b", from_version=3))
            assert (await later.read()).is_bad
            await asyncio.to_thread(trainer.publish, 4)
            assert [(await subscription.read()).version for subscription in (call, later)] == [4, 4]
            status = await stub.GetStatus(pb.GetTrainerStatusRequest())
            assert (status.newest_version, status.num_subscribers) == (4, 2)
            assert [(info.version, info.is_bad) for info in status.versions] == [
                (1, False),
                (2, False),
                (3, True),
                (4, False),
            ]

    run(scenario())


def test_a_hundred_subscribers_hear_at_once_and_one_that_never_reads_holds_up_none(
    tmp_path: Path, drafter: Path
) -> None:
    async def scenario() -> None:
        async with training(tmp_path, drafter) as trainer, trainer.stub() as stub:
            lazy = stub.SubscribeVersions(pb.SubscribeVersionsRequest(server_id="lazy"))
            calls = [stub.SubscribeVersions(pb.SubscribeVersionsRequest(server_id=f"s{i}")) for i in range(100)]
            await asyncio.gather(*(call.initial_metadata() for call in [lazy, *calls]))
            for seed in range(1, 4):
                await asyncio.to_thread(trainer.publish, seed)
                heard = await asyncio.wait_for(asyncio.gather(*(call.read() for call in calls)), 5)
                assert {info.version for info in heard} == {seed}
            for call in calls:
                call.cancel()
            await eventually(lambda: trainer.server._service.num_subscribers == 1)

    run(scenario())


def test_files_come_in_chunks_from_any_offset(tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaflash.rpc.trainer_service.MAX_CHUNK_BYTES", 10_000)

    async def scenario() -> None:
        async with training(tmp_path, drafter) as trainer, trainer.stub() as stub:
            trainer.publish(1)
            for file in ("model.safetensors", "config.json", "manifest.json"):
                expected = (trainer.store.get(1).directory / file).read_bytes()
                for offset in (0, 1, len(expected) // 2, len(expected) - 1, len(expected)):
                    chunks = await _fetch(stub, 1, file, offset=offset)
                    assert b"".join(chunk.data for chunk in chunks) == expected[offset:]
                    assert all(zlib.crc32(chunk.data) == chunk.crc32 for chunk in chunks)
                    assert [chunk.offset for chunk in chunks] == [*range(offset, len(expected), 10_000)]
            (chunk,) = await _fetch(stub, 1, "model.safetensors", offset=5, max_bytes=100)
            assert (chunk.offset, len(chunk.data)) == (5, 100)

    run(scenario())


def test_what_cannot_be_fetched_has_its_own_code(tmp_path: Path, drafter: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path, drafter, keep=3) as trainer, trainer.stub() as stub:
            for seed in range(1, 5):
                trainer.publish(seed)
            trainer.store.mark_bad(3, "poor")
            size = (trainer.store.get(4).directory / "config.json").stat().st_size
            for fields, code, words in (
                ({"version": 9, "file": "config.json"}, "NOT_FOUND", "version 9 is not in the store: must be one of"),
                ({"version": 1, "file": "config.json"}, "NOT_FOUND", "version 1 is not in the store"),
                ({"version": 4, "file": "../state.json"}, "NOT_FOUND", "has no file '../state.json'"),
                ({"version": 4}, "NOT_FOUND", "has no file ''"),
                ({"version": 3, "file": "config.json"}, "FAILED_PRECONDITION", "was marked bad: poor"),
                ({"version": 4, "file": "config.json", "offset": size + 1}, "OUT_OF_RANGE", f"{size} bytes"),
                ({"version": 2**64 - 1, "file": "x", "offset": 2**64 - 1}, "NOT_FOUND", "not in the store"),
            ):
                found, details = await _code(stub.FetchVersion(pb.FetchVersionRequest(**fields)))
                assert (found.name, words in details) == (code, True), (fields, found, details)
            path = trainer.store.get(2).directory / "config.json"
            path.write_bytes(path.read_bytes()[:-1] + b"x")
            with pytest.raises(Exception, match="sha256"):
                trainer.store.verify(2)
            found, _ = await _code(stub.FetchVersion(pb.FetchVersionRequest(version=2, file="config.json")))
            assert found == grpc.StatusCode.DATA_LOSS
            assert "sha256" in (await stub.GetStatus(pb.GetTrainerStatusRequest())).damaged["v00000002"]

    run(scenario())


def test_reports_are_kept_and_a_bad_version_is_bad_for_everyone(tmp_path: Path, drafter: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path, drafter) as trainer, trainer.stub() as stub:
            for seed in range(1, 4):
                trainer.publish(seed)

            async def report(version: int, event: int, server_id: str = "a", **fields: Any) -> None:
                await stub.ReportVersion(
                    pb.ReportVersionRequest(server_id=server_id, version=version, event=event, **fields)  # type: ignore[arg-type]
                )

            await report(0, pb.VERSION_EVENT_ACTIVATED)
            await report(1, pb.VERSION_EVENT_ACTIVATED)
            await report(2, pb.VERSION_EVENT_ACTIVATED, "b", acceptance_length=2.5, num_rounds=10)
            await report(1, pb.VERSION_EVENT_ACTIVATED, "c")
            assert trainer.store.pins == {"active": 2, "last_good": 1}
            await report(3, pb.VERSION_EVENT_CANARY)
            await report(2, pb.VERSION_EVENT_BAD, reason="acceptance fell")
            assert trainer.store.pins == {"active": 1, "last_good": 1, "trial:a": 3}
            assert trainer.store.bad == {2: "a: acceptance fell"}
            status = await stub.GetStatus(pb.GetTrainerStatusRequest())
            assert {(server.server_id, server.version) for server in status.servers} == {("a", 2), ("b", 2), ("c", 1)}
            assert (status.active_version, status.last_good_version) == (1, 1)
            # What a server that is gone had on trial is kept until something newer has passed.
            trainer.publish(4)
            await report(4, pb.VERSION_EVENT_CANARY, "d")
            await report(4, pb.VERSION_EVENT_ACTIVATED, "d")
            assert trainer.store.pins == {"active": 4, "last_good": 1}

    run(scenario())


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"version": 5, "event": 1}, "NOT_FOUND", "version 5 was never published"),
        ({"version": 1}, "INVALID_ARGUMENT", "event=0 is invalid: must be one of staged, refused"),
        ({"version": 1, "event": 77}, "INVALID_ARGUMENT", "event=77"),
        ({"version": 1, "event": 1, "server_id": ""}, "INVALID_ARGUMENT", "server_id=''"),
        ({"version": 1, "event": 1, "server_id": "x" * 257}, "INVALID_ARGUMENT", "server_id="),
        ({"version": 1, "event": 1, "acceptance_length": float("nan")}, "INVALID_ARGUMENT", "acceptance_length"),
        ({"version": 1, "event": 1, "reason": "x" * 2001}, "INVALID_ARGUMENT", "at most 2000 characters"),
        ({"version": 2**63, "event": 1}, "INVALID_ARGUMENT", "version="),
    ],
)
def test_an_invalid_report_names_its_field(tmp_path: Path, drafter: Path, fields: Any, code: str, words: str) -> None:
    async def scenario() -> None:
        async with training(tmp_path, drafter) as trainer, trainer.stub() as stub:
            trainer.publish(1)
            found, details = await _code(stub.ReportVersion(pb.ReportVersionRequest(**{"server_id": "a", **fields})))
            assert (found.name, words in details) == (code, True), details

    run(scenario())


def test_malformed_bytes_and_unknown_fields_are_invalid_arguments(tmp_path: Path, drafter: Path, caplog: Any) -> None:
    async def scenario() -> None:
        async with training(tmp_path, drafter) as trainer:
            async with grpc.aio.insecure_channel(trainer.server.address) as channel:
                for method in (method.name for method in pb.DESCRIPTOR.services_by_name["Trainer"].methods):
                    for data in (b"\xff\xff\xff", b"\x0b", b"\x80" * 11, b"\xa2\x06\x01a"):
                        code = await call_raw(channel, SERVICE + method, data)
                        assert code == grpc.StatusCode.INVALID_ARGUMENT, (method, data)
                large = bytes(5_000_000)
                assert await call_raw(channel, SERVICE + "GetStatus", large) == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert trainer.sink.trajectories == []

    run(scenario())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("given", [None, INFERENCE_KEY, TOKEN + "x"])
def test_a_wrong_token_is_unauthenticated_on_every_method(
    tmp_path: Path, drafter: Path, given: str | None, caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    metadata = None if given is None else (("authorization", f"Bearer {given}"),)

    async def scenario() -> None:
        async with training(tmp_path, drafter, api_key=TOKEN) as trainer, trainer.stub() as stub:
            trainer.publish(1)
            for call in (
                stub.SubmitTrajectories(iter([trajectory_to_pb(trajectory())]), metadata=metadata),
                stub.SubscribeVersions(pb.SubscribeVersionsRequest(server_id="a"), metadata=metadata),
                stub.FetchVersion(pb.FetchVersionRequest(version=1, file="config.json"), metadata=metadata),
                stub.ReportVersion(pb.ReportVersionRequest(server_id="a", version=1, event=6), metadata=metadata),
                stub.ActivateVersion(pb.ActivateVersionRequest(version=1), metadata=metadata),
                stub.GetStatus(pb.GetTrainerStatusRequest(), metadata=metadata),
            ):
                code, details = await _code(call)
                assert (code, TOKEN in details) == (grpc.StatusCode.UNAUTHENTICATED, False)
            assert (trainer.store.bad, trainer.sink.trajectories, trainer.store.next_version) == ({}, [], 2)
            async with grpc.aio.insecure_channel(trainer.server.address) as channel:
                assert await call_raw(channel, "/grpc.health.v1.Health/Check", b"") == grpc.StatusCode.OK

    run(scenario())
    assert TOKEN not in caplog.text


def test_a_client_with_a_wrong_token_gets_nothing_and_one_with_the_right_token_does(
    tmp_path: Path, drafter: Path
) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter, api_key=TOKEN) as trainer:
            trainer.publish(1)
            address = trainer.server.address
            async with client_of(address, tmp_path / "a", drafter, token=INFERENCE_KEY) as wrong:
                await eventually(lambda: "UNAUTHENTICATED" in str(wrong.client.status.last_error))
                async with client_of(address, tmp_path / "b", drafter, token=TOKEN) as right:
                    await right.has(1)
                assert wrong.versions == []

    run(scenario())


def test_versions_arrive_over_tls(tmp_path: Path, drafter: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    files = {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter, api_key=TOKEN, **files) as trainer:
            trainer.publish(1)
            address = f"localhost:{trainer.server.port}"
            trusting = ClientTls(authority.cert_pem.bytes())
            stranger = ClientTls(trustme.CA().cert_pem.bytes())
            async with (
                client_of(address, tmp_path / "a", drafter, token=TOKEN, tls=trusting) as right,
                client_of(address, tmp_path / "b", drafter, token=TOKEN, tls=stranger) as distrustful,
                client_of(address, tmp_path / "c", drafter, token=TOKEN) as plain,
            ):
                await right.has(1)
                for other in (distrustful, plain):
                    await eventually(lambda other=other: "UNAVAILABLE" in str(other.client.status.last_error))
                    assert other.versions == []

    run(scenario())


def test_a_drain_ends_subscriptions_and_lets_a_fetch_finish(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow_read(stream: Any, offset: int, num_bytes: int) -> bytes:
        reading.set()
        assert go_on.wait(10)
        stream.seek(offset)
        return bytes(stream.read(num_bytes))

    async def scenario() -> None:
        async with training(tmp_path, drafter) as trainer, trainer.stub() as stub:
            trainer.publish(1)
            subscription = stub.SubscribeVersions(pb.SubscribeVersionsRequest(server_id="a"))
            assert (await subscription.read()).version == 1
            monkeypatch.setattr("adaflash.rpc.trainer_service._read", slow_read)
            fetch = asyncio.create_task(_fetch(stub, 1, "config.json"))
            await asyncio.to_thread(reading.wait, 10)
            draining = asyncio.create_task(trainer.server.drain())
            code, details = await _code(subscription.read())
            assert (code, "subscribe again" in details) == (grpc.StatusCode.UNAVAILABLE, True)
            async with grpc.aio.insecure_channel(trainer.server.address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                reply = await health.Check(health_pb2.HealthCheckRequest(service="adaflash.v1.Trainer"))
                assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
            go_on.set()
            (chunk,) = await fetch
            assert len(chunk.data) == (drafter / "config.json").stat().st_size
            assert await draining

    run(scenario())
