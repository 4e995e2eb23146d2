# SPDX-License-Identifier: Apache-2.0
import asyncio
import logging
import ssl

import grpc
import pytest
import trustme

from adaflash.config import ServerConfig
from adaflash.errors import ConfigError, UnavailableError
from adaflash.request import SamplingParams
from adaflash.rpc.client import ClientTls, GenerateClient
from adaflash.rpc.listener import warn_when_open
from adaflash.rpc.server import GrpcServer
from adaflash.rpc.status import RpcError
from tests.fake_engine import FakeEngine
from tests.serving import call_raw, run, serving

KEY = "s3cret-key"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
ONE = SamplingParams(max_tokens=1)


@pytest.mark.parametrize("given", [None, "wrong", "", KEY + "x", KEY[:-1]])
def test_a_missing_or_wrong_key_is_unauthenticated_on_every_method(given, caplog):
    caplog.set_level(logging.DEBUG)

    async def scenario():
        async with serving(api_key=KEY) as served, GenerateClient(served.address, api_key=given) as client:
            stream = client.generate_stream("a", ONE)
            for call in (client.generate("a", ONE), anext(stream), client.abort("x"), client.server_info()):
                with pytest.raises(RpcError) as error_info:
                    await call
                assert error_info.value.code == grpc.StatusCode.UNAUTHENTICATED
                assert KEY not in str(error_info.value)
            assert served.engine.prompts_seen == []

    run(scenario())
    assert KEY not in caplog.text


def test_the_right_key_is_let_in():
    async def scenario():
        async with serving(api_key=KEY) as served:
            assert (await served.client.generate("a", ONE)).outputs[0].token_ids == [0]

    run(scenario())


def test_health_is_open_and_reflection_is_not():
    async def scenario():
        async with serving(api_key=KEY) as served, grpc.aio.insecure_channel(served.address) as channel:
            assert await call_raw(channel, "/grpc.health.v1.Health/Check", b"") == grpc.StatusCode.OK
            assert await call_raw(channel, REFLECTION, b"\x3a\x00") == grpc.StatusCode.UNAUTHENTICATED
        async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
            assert await call_raw(channel, REFLECTION, b"\x3a\x00") == grpc.StatusCode.OK

    run(scenario())


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


def _server_files(authority, folder) -> dict[str, str]:
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}


async def _is_served(address: str, tls: ClientTls | None, api_key: str | None = None) -> bool:
    async with GenerateClient(address, tls=tls, api_key=api_key) as client:
        try:
            await client.generate("a", ONE, timeout_s=5.0)
        except UnavailableError:
            return False
        return True


def test_tls_is_served_to_who_trusts_the_authority(authority, tmp_path):
    async def scenario():
        async with serving(**_server_files(authority, tmp_path), api_key=KEY) as served:
            address = f"localhost:{served.server.port}"
            assert await _is_served(address, ClientTls(authority.cert_pem.bytes()), KEY)
            assert not await _is_served(address, ClientTls(trustme.CA().cert_pem.bytes()), KEY)
            assert not await _is_served(address, None, KEY)

    run(scenario())


def test_mtls_serves_only_clients_with_a_certificate_of_the_authority(authority, tmp_path):
    files = _server_files(authority, tmp_path)
    files["ssl_ca_certs"] = str(tmp_path / "ca.pem")

    def client_tls(client_authority: trustme.CA) -> ClientTls:
        certificate = client_authority.issue_cert("client@example.org")
        chain = certificate.cert_chain_pems[0].bytes()
        return ClientTls(authority.cert_pem.bytes(), chain, certificate.private_key_pem.bytes())

    async def scenario():
        async with serving(**files, ssl_cert_required=True) as served:
            address = f"localhost:{served.server.port}"
            assert await _is_served(address, client_tls(authority))
            assert not await _is_served(address, client_tls(trustme.CA()))
            assert not await _is_served(address, ClientTls(authority.cert_pem.bytes()))
            assert served.engine.prompts_seen == ["a"]

    run(scenario())


def test_the_served_certificate_is_the_configured_one(authority, tmp_path):
    async def scenario():
        async with serving(**_server_files(authority, tmp_path)) as served:
            arguments = (("127.0.0.1", served.server.port),)
            pem = await asyncio.to_thread(ssl.get_server_certificate, *arguments)
            assert pem.strip() == (tmp_path / "cert.pem").read_text().strip()

    run(scenario())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ssl_certfile": "cert.pem"}, "go together"),
        ({"ssl_cert_required": True}, "needs ssl_ca_certs"),
        ({"ssl_ca_certs": "ca.pem"}, "no effect"),
    ],
)
def test_incomplete_tls_settings_are_refused(authority, tmp_path, config, message):
    _server_files(authority, tmp_path)
    values = {name: str(tmp_path / value) if isinstance(value, str) else value for name, value in config.items()}
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**values)


def test_unusable_tls_files_are_refused_at_start(authority, tmp_path):
    files = _server_files(authority, tmp_path)
    (tmp_path / "key.pem").write_text("not a key")

    async def scenario():
        with pytest.raises(ConfigError, match="grpc_port"):
            await GrpcServer(FakeEngine(), ServerConfig(grpc_port=0, **files)).start()

    run(scenario())


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        ({"host": "0.0.0.0"}, "anybody who reaches"),
        ({"host": "0.0.0.0", "api_key": KEY}, "unencrypted"),
        ({"host": "127.0.0.1"}, None),
    ],
)
def test_an_open_server_warns_at_start(config, warning, caplog):
    warn_when_open(ServerConfig(grpc_port=0, **config))
    assert [record.levelname for record in caplog.records] == ([] if warning is None else ["WARNING"])
    assert (warning or "") in caplog.text


def test_a_port_in_use_is_an_error_and_not_shared():
    async def scenario():
        async with serving() as served:
            with pytest.raises(ConfigError, match=f"grpc_port={served.server.port}"):
                await GrpcServer(FakeEngine(), ServerConfig(grpc_port=served.server.port)).start()

    run(scenario())
