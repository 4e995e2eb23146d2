# SPDX-License-Identifier: Apache-2.0
"""Keeps the ports of a server from others while its engine loads; the server itself binds them afterwards."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from adaflash.config import ServerConfig
from adaflash.errors import ConfigError


@contextmanager
def reserve_ports(config: ServerConfig) -> Iterator[None]:
    """Hold the ports that `config` names until the block ends; nothing listens on them, so clients are refused.

    For port 0 any port is held: that shows whether the host can be bound; the server picks its own later.

    Raises:
        ConfigError: A port is taken, or the host cannot be bound.
    """
    with ExitStack() as stack:
        for field in ("grpc_port", "metrics_port"):
            port = getattr(config, field)
            if port is not None:
                _reserve(config.host, field, port, stack)
        yield


def _reserve(host: str, field: str, port: int, stack: ExitStack) -> None:
    """Bind every address of `host`; those this machine does not have do not matter while there is another."""
    absent: list[OSError] = []
    addresses = _addresses(host, port)
    for family, address in addresses:
        try:
            stack.enter_context(_reserved_socket(family, address))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise ConfigError(
                    f"{field}={port} is invalid: must be a port that is free on {host}, or 0 to take any ({error})"
                ) from error
            absent.append(error)
    if len(absent) == len(addresses):
        raise _host_error(host, absent[0])


def _addresses(host: str, port: int) -> list[tuple[int, tuple[object, ...]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _host_error(host, error) from error
    # Some resolvers give an address twice, and binding it twice would look like a clash.
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _host_error(host: str, error: OSError) -> ConfigError:
    return ConfigError(f"host={host!r} is invalid: must be a name or an address of this machine ({error})")


def _reserved_socket(family: int, address: tuple[object, ...]) -> socket.socket:
    """Return a socket that keeps everybody else from `address`.

    Where plain binding fails, only connections of an earlier server may be in the way (TIME_WAIT): SO_REUSEADDR looks
    past them. It looks past sockets like these, too, hence not at first.
    """
    try:
        return _bound_socket(family, address, reuse=False)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    return _bound_socket(family, address, reuse=True)


def _bound_socket(family: int, address: tuple[object, ...], reuse: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
