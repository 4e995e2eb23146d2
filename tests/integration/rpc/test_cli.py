# SPDX-License-Identifier: Apache-2.0
"""`adaflash generate` and `adaflash serve` from the outside."""

import asyncio
import json
import signal
import sys

import trustme

from adaflash.cli.main import main
from adaflash.request import ChatMessage
from adaflash.rpc.client import GenerateClient
from tests.fake_engine import FakeEngine
from tests.serving import run, serving


async def _generate(address: str, *argv: str) -> int:
    return await asyncio.to_thread(main, ["generate", "--address", address, *argv])


def test_generate_streams_the_text_of_a_server(capsys):
    async def scenario():
        async with serving(FakeEngine(token_delay_s=0.002)) as served:
            assert await _generate(served.address, "hello", "--max-tokens", "5", "--temperature", "0.5") == 0
            assert served.engine.prompts_seen == ["hello"]
            assert served.engine.params_seen[0].temperature == 0.5

    run(scenario())
    assert capsys.readouterr().out == " 0 1 2 3 4\n"


def test_generate_prints_one_json_object(capsys):
    async def scenario():
        async with serving() as served:
            argv = (
                "hi",
                "--chat",
                "--system",
                "be brief",
                "--json",
                "--n",
                "2",
                "--max-tokens",
                "3",
                "--logprobs",
                "1",
            )
            stop = ("--stop", "x", "--stop", "y", "--stop-token-ids", "7", "--logit-bias", '{"5": 1.5}')
            assert await _generate(served.address, *argv, *stop) == 0
            assert served.engine.prompts_seen == [[ChatMessage("system", "be brief"), ChatMessage("user", "hi")]]
            params = served.engine.params_seen[0]
            assert (params.stop, params.stop_token_ids, params.logit_bias) == (["x", "y"], [7], {5: 1.5})

    run(scenario())
    reply = json.loads(capsys.readouterr().out)
    assert [output["token_ids"] for output in reply["outputs"]] == [[0, 1, 2], [0, 1, 2]]
    assert reply["outputs"][0]["logprobs"][0]["chosen"]["token_id"] == 0
    assert reply["usage"]["num_output_tokens"] == 6
    assert reply["speculation"]["acceptance_length"] == 1.0


def test_generate_prints_every_sample(capsys):
    async def scenario():
        async with serving() as served:
            assert await _generate(served.address, "hi", "--n", "2", "--max-tokens", "2") == 0

    run(scenario())
    assert capsys.readouterr().out == "[0]  0 1\n[1]  0 1\n"


def test_generate_sends_key_and_speaks_tls(capsys, monkeypatch, tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("ADAFLASH_API_KEY", "from-environment")

    async def scenario():
        files = {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
        async with serving(**files, api_key="from-environment") as served:
            address = f"localhost:{served.server.port}"
            tls = ("--tls", "--ssl-ca-certs", str(tmp_path / "ca.pem"))
            assert await _generate(address, "hi", *tls, "--max-tokens", "1") == 0
            assert await _generate(address, "hi", *tls, "--max-tokens", "1", "--api-key", "wrong") == 1

    run(scenario())
    streams = capsys.readouterr()
    assert streams.out == " 0\n"
    assert "UNAUTHENTICATED" in streams.err


def test_a_request_refused_by_the_server_names_the_field(capsys):
    async def scenario():
        async with serving() as served:
            assert await _generate(served.address, "hi", "--stop-token-ids", "5000") == 2

    run(scenario())
    assert "stop_token_ids=5000 is invalid" in capsys.readouterr().err


def test_serve_loads_says_what_is_active_serves_and_drains(tiny_setup):
    setup = tiny_setup("llama")
    argv = ("serve", str(setup.target), "--draft", str(setup.drafters["random"]), "--device", "cpu", "--grpc-port", "0")
    flags = ("--num-kv-blocks", "64", "--num-threads", "1", "--metrics-port", "0", "--verify-policy", "fixed")

    async def scenario():
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        command = [sys.executable, "-m", "adaflash.cli.main", *argv, *flags]
        process = await asyncio.create_subprocess_exec(*command, **pipes)
        try:
            ready = (await process.stdout.readline()).decode().split()
            assert ready[0] == "ready"
            address = dict(word.split("=", 1) for word in ready[1:])["address"]
            async with GenerateClient(address) as client:
                assert (await client.server_info()).engine.verify_policy == "fixed"
                reply = await client.generate([5, 6, 7])
                assert reply.speculation.num_verified_tokens > 0
            process.send_signal(signal.SIGTERM)
            _, err = await asyncio.wait_for(process.communicate(), 10)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0
        log = err.decode()
        assert "verify_policy=fixed" in log
        assert "kv_blocks=64x" in log
        assert "native_ops=" in log
        assert "drained all_finished=True" in log

    run(scenario(), timeout_s=60)
