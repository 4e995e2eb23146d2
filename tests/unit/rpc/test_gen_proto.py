# SPDX-License-Identifier: Apache-2.0
import importlib
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def _has_grpcio_tools() -> bool:
    try:
        return version("grpcio-tools") == "1.78.0"
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(not _has_grpcio_tools(), reason="grpcio-tools==1.78.0 is not installed")
def test_the_committed_code_is_what_the_proto_generates():
    command = [sys.executable, str(ROOT / "tools" / "gen_proto.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("name", "service"), [("generate", "Generation"), ("trainer", "Trainer")])
def test_the_committed_code_describes_the_methods_and_messages_of_the_proto(name, service):
    descriptor = importlib.import_module(f"adaflash.rpc.pb.{name}_pb2").DESCRIPTOR
    source = (ROOT / "proto" / "adaflash" / "v1" / f"{name}.proto").read_text()
    messages = set(re.findall(r"^message (\w+)", source, re.MULTILINE))
    methods = set(re.findall(r"^  rpc (\w+)", source, re.MULTILINE))
    assert set(descriptor.message_types_by_name) == messages
    assert {method.name for method in descriptor.services_by_name[service].methods} == methods
