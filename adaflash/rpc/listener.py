# SPDX-License-Identifier: Apache-2.0
"""How a gRPC server listens: its address, TLS and channel options; for every server of this package."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc

from adaflash.config import ServerConfig
from adaflash.errors import ConfigError

logger = logging.getLogger(__name__)

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


def bind(server: grpc.aio.Server, config: ServerConfig) -> int:
    """Bind a server to the host and `grpc_port` of `config`, with TLS when it has files, and return the port.

    Raises:
        ConfigError: The address cannot be bound or the TLS files cannot be used.
    """
    address = join_host_port(config.host, config.grpc_port)
    try:
        credentials = server_credentials(config)
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"host={config.host!r} grpc_port={config.grpc_port}: {error}") from error
    if port == 0:
        raise ConfigError(f"{address} cannot be bound, or the TLS files cannot be used")
    return port


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Return TLS or mTLS credentials from the config's files, None for plaintext."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    pair = (Path(config.ssl_keyfile).read_bytes(), Path(config.ssl_certfile).read_bytes())
    authorities = None if config.ssl_ca_certs is None else Path(config.ssl_ca_certs).read_bytes()
    return grpc.ssl_server_credentials([pair], authorities, config.ssl_cert_required)


def warn_when_open(config: ServerConfig) -> None:
    """Log a warning when strangers can use the server, or read its key on the way."""
    if config.host not in LOOPBACK_HOSTS and config.api_key is None and not config.ssl_cert_required:
        logger.warning("anybody who reaches host=%s can use this server: set api_key or mTLS", config.host)
    if config.host not in LOOPBACK_HOSTS and config.api_key is not None and config.ssl_certfile is None:
        logger.warning("the API key crosses the network unencrypted: set ssl_certfile and ssl_keyfile")


def join_host_port(host: str, port: int) -> str:
    """Return `host:port`, with the brackets an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    """Return the options of every server."""
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # A second server on the port is an error, not a silent share of its traffic.
        ("grpc.so_reuseport", 0),
        # Find clients that vanished without closing; their requests are aborted.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Routers ping idle connections every 30 s; the default answers that with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]
