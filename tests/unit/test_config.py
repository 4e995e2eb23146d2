# SPDX-License-Identifier: Apache-2.0
"""A variable that is meant for this package but means nothing to it is an error that names it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from adaflash.config import EngineConfig, ServerConfig, check_environment, environment_overrides
from adaflash.errors import ConfigError


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("ADAFLASH_VERFIY_POLICY", r" \(did you mean 'ADAFLASH_VERIFY_POLICY'\?\)"),
        ("ADAFLASH_CACHE_DRI", r" \(did you mean 'ADAFLASH_CACHE_DIR'\?\)"),
        ("ADAFLASH_PORT", r" \(did you mean 'ADAFLASH_GRPC_PORT'\?\)"),
        ("ADAFLASH_XQ", ""),
    ],
)
def test_an_unknown_variable_is_refused_by_name(variable: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"^unknown environment variable '{variable}'{hint}$"):
        check_environment({"ADAFLASH_SEED": "1", variable: "off"})


def test_every_setting_is_a_known_variable() -> None:
    fields = (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig))
    settings = {f"ADAFLASH_{field.name.upper()}": "x" for field in fields}
    check_environment({**settings, "ADAFLASH_CACHE_DIR": "/tmp", "OTHER": "x", "XADAFLASH_Y": "x"})


def test_what_kubernetes_sets_for_a_service_is_no_setting() -> None:
    url, host = "tcp://10.0.0.1:50051", "10.0.0.1"
    links = {"SERVICE_HOST": host, "SERVICE_PORT": "50051", "SERVICE_PORT_GRPC": "50051", "PORT": url}
    links |= {"PORT_50051_TCP": url, "PORT_50051_TCP_ADDR": host, "WEB_SERVICE_HOST": host, "WEB_PORT": url}
    links |= {"GRPC_PORT": url, "METRICS_PORT": url}  # of Services named adaflash-grpc and adaflash-metrics
    environ = {f"ADAFLASH_{name}": value for name, value in links.items()}
    check_environment(environ)
    assert environment_overrides(["grpc_port", "metrics_port"], environ) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grpc_port": "50051"}, "grpc_port='50051' is invalid: must be an integer"),
        ({"grpc_port": True}, "grpc_port=True is invalid: must be an integer"),
        ({"grpc_port": None}, "grpc_port=None is invalid: must be an integer"),
        ({"metrics_port": 1.5}, "metrics_port=1.5 is invalid: must be an integer"),
        ({"metrics_port": 65536}, r"metrics_port=65536 is invalid: must be in \[0, 65535\]"),
        (
            {"grpc_port": 9000, "metrics_port": 9000},
            "metrics_port=9000 is invalid: must be another port",
        ),
    ],
)
def test_ports_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**options)
