# SPDX-License-Identifier: Apache-2.0
"""Ports are kept while a model loads, and nobody is let in through them meanwhile."""

import socket

import pytest

from adaflash.config import ServerConfig
from adaflash.errors import ConfigError
from adaflash.rpc.ports import reserve_ports


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports


def test_a_second_server_is_refused_while_the_first_loads():
    grpc_port, metrics_port, other = _free_ports(3)
    with reserve_ports(ServerConfig(grpc_port=grpc_port, metrics_port=metrics_port)):
        for field, port in (("grpc_port", grpc_port), ("metrics_port", metrics_port)):
            clash = {"grpc_port": other, field: port}
            with (
                pytest.raises(ConfigError, match=f"{field}={port} is invalid: must be a port that is free"),
                reserve_ports(ServerConfig(**clash)),
            ):
                pass


def test_clients_are_refused_while_ports_are_reserved_and_the_port_is_free_after():
    (port,) = _free_ports(1)
    with reserve_ports(ServerConfig(grpc_port=port)), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_a_stopped_server_left_behind_can_be_reserved():
    """Connections that the server closed first stay in TIME_WAIT on its port for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()
        client.close()
    with reserve_ports(ServerConfig(grpc_port=port)):
        pass


def test_one_port_for_both_is_a_clash():
    (port,) = _free_ports(1)
    with (
        pytest.raises(ConfigError, match=f"metrics_port={port} is invalid"),
        reserve_ports(ServerConfig(grpc_port=port, metrics_port=port)),
    ):
        pass


def test_a_name_of_several_addresses_can_be_reserved_where_some_do_not_exist(monkeypatch):
    (port,) = _free_ports(1)
    here, nowhere = ("127.0.0.1", port), ("192.0.2.1", port)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in (nowhere, here)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    taken = pytest.raises(OSError, match="in use")
    with reserve_ports(ServerConfig(host="both", grpc_port=port)), socket.socket() as other, taken:
        other.bind(here)


@pytest.mark.parametrize("is_port_picked", [False, True])
@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_cannot_be_bound_is_named(host, is_port_picked):
    port = 0 if is_port_picked else _free_ports(1)[0]
    with pytest.raises(ConfigError, match=f"host='{host}'"), reserve_ports(ServerConfig(host=host, grpc_port=port)):
        pass


def test_ports_to_be_picked_do_not_clash():
    with reserve_ports(ServerConfig(grpc_port=0, metrics_port=0)), reserve_ports(ServerConfig(grpc_port=0)):
        pass
