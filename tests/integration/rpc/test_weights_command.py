# SPDX-License-Identifier: Apache-2.0
"""`adaflash weights` against a trainer, and what servers make of it."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from adaflash import durable_files
from adaflash.cli.main import main
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.training.version_report import VersionReport
from tests.serving import eventually, run
from tests.trainers import client_of, training
from tests.versions import tiny_drafter


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter(tmp_path_factory.mktemp("tiny"))


async def _weights(address: str, *argv: str) -> int:
    return await asyncio.to_thread(main, ["weights", *argv, "--trainer", address])


async def _error_of(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await call
    return info.value.code().name, info.value.details() or ""


def test_list_shows_versions_and_what_servers_reported(
    tmp_path: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            assert await _weights(trainer.server.address, "list") == 0
            trainer.publish(1, metrics={"acceptance_length": 2.25})
            trainer.publish(2, kind="DELTA", base_version=1, train_step=64)
            trainer.publish(3)
            trainer.store.mark_bad(3, "poor\n\x1b[31m")
            trainer.store.pin("demo", 1)
            async with client_of(trainer.server.address, tmp_path / "a", drafter, "npu-0") as client:
                await client.has(2)
                client.client.report(VersionReport(2, "activated", acceptance_length=3.5, num_rounds=70))
                await eventually(lambda: trainer.store.pins.get("active") == 2, 20)
                assert await _weights(trainer.server.address, "list") == 0
                assert await _weights(trainer.server.address, "list", "--json") == 0

    run(scenario(), 60)
    *lines, as_json = capsys.readouterr().out.splitlines()
    assert "no versions" in lines
    assert "no reports of servers" in lines
    rows = {tuple(line.split())[:2]: line for line in lines}
    assert "1.5e+05" not in "".join(lines)
    assert rows["1", "1"].endswith("  demo")
    assert "FULL" in rows["1", "1"]
    assert rows["2", "64"].endswith("  newest, active")
    assert rows["3", "1"].endswith(r"  BAD (poor\n\x1b[31m)")
    assert rows["npu-0", "2"].split() == ["npu-0", "2", "activated", "3.50", "70"]
    assert "metrics of 1: acceptance_length 2.25" in lines
    status = json.loads(as_json)
    assert [version["bad_reason"] for version in status["versions"]] == [None, None, "poor\n\x1b[31m"]
    assert [version["base_version"] for version in status["versions"]] == [None, 1, None]
    assert status["versions"][0]["metrics"] == {"acceptance_length": 2.25}
    assert status["versions"][0]["created_at"].startswith("20")
    assert status["versions"][2]["num_bytes"] > 0
    assert status["pins"] == {"active": 2, "demo": 1}
    assert status["servers"]["npu-0"]["event"] == "activated"


def test_an_activated_version_reaches_every_server_under_a_new_number(
    tmp_path: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            for seed in (1, 2, 3):
                trainer.publish(seed, train_step=10 * seed)
            async with client_of(trainer.server.address, tmp_path / "a", drafter) as client:
                await client.has(3)
                assert await _weights(trainer.server.address, "activate", "1") == 0
                staged = await client.has(4)
                for name in ("model.safetensors", "config.json"):
                    old = trainer.store.get(1).directory / name
                    assert (staged.directory / name).read_bytes() == old.read_bytes()
                assert (staged.manifest.base_version, staged.manifest.train_step) == (1, 10)

    run(scenario(), 60)
    assert capsys.readouterr().out == "version 1 is published again as 4\n"


def test_rollback_takes_the_active_version_from_every_server_and_then_the_one_before_it(
    tmp_path: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            trainer.publish(1)
            trainer.publish(2)
            async with client_of(trainer.server.address, tmp_path / "a", drafter) as client:
                await client.has(2)
                for version in (1, 2):
                    client.client.report(VersionReport(version, "activated"))
                await eventually(lambda: trainer.store.pins == {"last_good": 1, "active": 2}, 20)
                assert await _weights(trainer.server.address, "rollback") == 0
                operator = f"operator@{socket.gethostname()}: by hand"
                await eventually(lambda: client.bad == [(2, operator)], 20)
                assert trainer.store.pins == {"last_good": 1, "active": 1}
                assert await _weights(trainer.server.address, "rollback", "2") == 1
                assert await _weights(trainer.server.address, "rollback", "--json") == 0
                await eventually(lambda: client.bad == [(2, operator), (1, operator)], 20)
                assert trainer.store.pins == {}
                assert await _weights(trainer.server.address, "rollback") == 1

    run(scenario(), 60)
    streams = capsys.readouterr()
    first, second = streams.out.splitlines()
    assert first == "version 2 is marked bad by hand; the newest good one is 1"
    assert json.loads(second) == {"version": 1, "newest_version": 0}
    assert "version 2 was marked bad before: operator@" in streams.err
    assert "no version is active" in streams.err


def test_what_a_server_says_of_a_bad_version_is_taken_all_the_same(tmp_path: Path, drafter: Path) -> None:
    """A refused report would be sent again for ever."""

    async def scenario() -> None:
        async with training(tmp_path, drafter) as trainer, trainer.stub() as stub:
            for seed in (1, 2):
                trainer.publish(seed)
                trainer.store.mark_bad(seed, "poor")
            for event in pb.VersionEvent.values()[1:]:
                await stub.ReportVersion(pb.ReportVersionRequest(server_id="a", version=2, event=event))
            assert trainer.store.pins == {}

    run(scenario(), 60)


def test_activation_is_idempotent_and_says_what_cannot_be(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with training(tmp_path, drafter, keep=2) as trainer, trainer.stub() as stub:

            def activate(version: int, key: str = "") -> Any:
                return stub.ActivateVersion(pb.ActivateVersionRequest(version=version, idempotency_key=key))

            trainer.publish(1)
            trainer.publish(2)
            assert (await activate(1, "k")).version == 3
            assert (await activate(2, "k")).version == 4, "another version is another activation"
            with pytest.raises(Exception, match="not in the store"):
                trainer.store.get(1)
            assert (await activate(1, "k")).version == 3, "though the first one is gone"
            assert (await activate(4)).version == 5
            assert (await activate(4)).version == 6
            trainer.store.mark_bad(5, "poor")
            trainer.publish(7)
            assert await _error_of(activate(5)) == ("FAILED_PRECONDITION", "version 5 was marked bad: poor")
            code, details = await _error_of(activate(99))
            assert (code, "version 99 is not in the store: must be one of" in details) == ("NOT_FOUND", True)
            assert (await _error_of(activate(0)))[0] == "NOT_FOUND"
            assert (await _error_of(activate(7, "x" * 257)))[0] == "INVALID_ARGUMENT"
            before = trainer.store.next_version

            def full(path: Path, data: bytes) -> None:
                raise OSError(28, "No space left on device")

            with monkeypatch.context() as patch:
                patch.setattr("adaflash.training.version_directory.replace_file", full)
                code, details = await _error_of(activate(7))
            assert (code, "No space left" in details) == ("UNAVAILABLE", True)
            assert durable_files.replace_file is not full
            assert (await activate(7)).version == before + 1
            model = trainer.store.get(7).directory / "model.safetensors"
            model.write_bytes(model.read_bytes()[:-1] + b"x")
            assert (await _error_of(activate(7)))[0] == "DATA_LOSS"

    run(scenario(), 60)


def test_errors_are_clear(tmp_path: Path, drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{unused.getsockname()[1]}"
        assert main(["weights", "list", "--trainer", nowhere, "--timeout", "5"]) == 1
    assert f"the trainer at {nowhere} cannot be reached: " in capsys.readouterr().err
    assert main(["weights", "list"]) == 2
    assert "a trainer is needed: give --trainer HOST:PORT" in capsys.readouterr().err
    assert main(["weights"]) == 2
    assert "an action is needed: list, activate N or rollback [N]" in capsys.readouterr().err
    assert main(["weights", "list", "--trainer", nowhere, "--ssl-ca-certs", "x"]) == 2
    assert "have no effect without --tls" in capsys.readouterr().err
    for argv, words in (
        (["activate", "0"], "'0' is invalid: must be an integer in [1, "),
        (["rollback", "one"], "'one' is invalid: must be an integer in [1, "),
        (["list", "--timeout", "-1"], "'-1' is invalid: must be a number > 0"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(["weights", *argv, "--trainer", nowhere])
        assert (exit_info.value.code, words in capsys.readouterr().err) == (2, True)

    async def scenario() -> None:
        async with training(tmp_path, drafter) as trainer:
            assert await _weights(trainer.server.address, "activate", "7") == 1
            assert await _weights(trainer.server.address, "rollback", "7") == 1

    run(scenario(), 60)
    errors = capsys.readouterr().err
    assert "version 7 is not in the store: must be one of none yet" in errors
    assert "version 7 was never published" in errors


def test_the_trainers_token_is_sent_over_tls(
    tmp_path: Path, drafter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    files = {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
    monkeypatch.setenv("ADAFLASH_API_KEY", "of-inference")

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter, **files, api_key="of-the-trainer") as trainer:
            address = f"localhost:{trainer.server.port}"
            tls = ("--tls", "--ssl-ca-certs", str(tmp_path / "ca.pem"))
            assert await _weights(address, "list", *tls) == 1
            assert await _weights(address, "list", *tls, "--api-key", "of-the-trainer") == 0
            monkeypatch.setenv("ADAFLASH_TRAINER_API_KEY", "of-the-trainer")
            assert await _weights(address, "list", *tls) == 0

    run(scenario(), 60)
    assert "UNAUTHENTICATED" in capsys.readouterr().err
