# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from pathlib import Path

import grpc
import pytest

from adaflash.rpc.pb import trainer_pb2 as pb
from tests.mutations import mutate
from tests.serving import call_raw, run
from tests.trainers import training
from tests.versions import TARGET_DIGEST, tiny_drafter

SERVICE = "/adaflash.v1.Trainer/"
RECORD = pb.TrajectoryRecord(
    request_id="é",
    record_id="record",
    token_ids=[1, 2, 300],
    num_prompt_tokens=1,
    rounds={"num_verified": [2, 3], "num_accepted": [1, 1]},
    drafter_version=1,
    target_digest=TARGET_DIGEST,
    temperature=0.5,
    features={
        "safetensors": b"\x02\0\0\0\0\0\0\0{}",
        "dtype": "F32",
        "num_tokens": 1,
        "taps_size": 2,
        "hidden_size": 1,
    },
)
VALID = {
    "SubmitTrajectories": RECORD,
    "SubscribeVersions": pb.SubscribeVersionsRequest(from_version=2, server_id="server"),
    "FetchVersion": pb.FetchVersionRequest(version=1, file="config.json", offset=100, max_bytes=1000),
    "ReportVersion": pb.ReportVersionRequest(server_id="s", version=1, event=2, acceptance_length=2.5, reason="é"),  # type: ignore[arg-type]
    "ActivateVersion": pb.ActivateVersionRequest(version=99, idempotency_key="é"),
    "GetStatus": pb.GetTrainerStatusRequest(),
}
EXPECTED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED"}


def test_mutated_messages_never_end_as_internal_or_unknown(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """2,000 mutations of valid messages over every method; the trainer stays well."""
    drafter = tiny_drafter(tmp_path_factory.mktemp("tiny"))

    async def scenario() -> None:
        async with (
            training(tmp_path, drafter) as trainer,
            grpc.aio.insecure_channel(trainer.server.address) as channel,
        ):
            trainer.publish(1)
            rng = random.Random(20261130)
            seen: Counter[str] = Counter()

            async def fuzz(count: int) -> None:
                for _ in range(count):
                    method, message = rng.choice(list(VALID.items()))
                    data = mutate(rng, message.SerializeToString())
                    timeout_s = 0.1 if method == "SubscribeVersions" else 5.0
                    code = await call_raw(channel, SERVICE + method, data, timeout_s)
                    assert code.name in EXPECTED, (method, data.hex())
                    seen[code.name] += 1

            await asyncio.gather(*(fuzz(100) for _ in range(20)))
            assert min(seen["OK"], seen["INVALID_ARGUMENT"], seen["NOT_FOUND"]) > 50, seen
            assert trainer.publish(2) < 2**33

    run(scenario(), 120)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
