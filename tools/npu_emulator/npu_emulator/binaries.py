# SPDX-License-Identifier: Apache-2.0
"""Reads ELF files with binutils: which libraries and symbols torch_npu needs that this machine does not have."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_PACKAGES = {"nm": "binutils", "readelf": "binutils", "strings": "binutils", "gcc": "gcc"}
_SYSTEM_LIBRARY = re.compile(r"^(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|libgomp|ld-linux.*)\.so")
_RUNTIME_NAME = re.compile(r"(aclrt|aclmdl|aclop|aclprof|acl[A-Z])[A-Za-z0-9]+")
_OPERATOR_NAME = re.compile(r"aclnn[A-Z]\w*")


class BuildError(RuntimeError):
    """The stub libraries cannot be built; says what is missing and how to get it."""


class Missing(NamedTuple):
    """What CANN would provide.

    Attributes:
        libraries: File names (sonames) of shared libraries.
        functions: Runtime functions, linked against or looked up by name.
        operators: `aclnn*` functions, looked up by name.
    """

    libraries: list[str]
    functions: list[str]
    operators: list[str]


def tool(name: str, *arguments: str | Path) -> str:
    """The standard output of a binutils or compiler call."""
    if not shutil.which(name):
        raise BuildError(f"{name} was not found: install the package {_PACKAGES[name]} (apt-get install it on Debian)")
    result = subprocess.run([name, *map(str, arguments)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{name} {arguments[-1]} failed: {result.stderr.strip()[-2000:]}")
    return result.stdout


def package_folder(name: str) -> Path:
    """Where a package is installed; it is not imported."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise BuildError(f"{name} is not installed here: pip install --no-deps {name}")
    return Path(spec.origin).parent


def _needed(path: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", tool("readelf", "-d", path))


def _defined(path: Path) -> set[str]:
    lines = (line.split() for line in tool("nm", "-D", "--defined-only", path).splitlines())
    return {fields[-1].split("@")[0] for fields in lines if len(fields) >= 3}


def _undefined(path: Path) -> set[str]:
    """Strong undefined symbols without a version; those with one belong to glibc or libstdc++."""
    lines = (line.split() for line in tool("nm", "-D", "--undefined-only", path).splitlines())
    return {name for fields in lines if len(fields) == 2 and fields[0] == "U" and "@" not in (name := fields[1])}


def _in_process(names: Iterable[str]) -> set[str]:
    process = ctypes.CDLL(None)
    return {name for name in names if name.startswith(("Py", "_Py")) or hasattr(process, name)}


def find_missing() -> Missing:
    """Compare what the installed torch_npu needs with what it, torch and the system have.

    Raises:
        BuildError: torch, torch_npu or a tool is not installed.
    """
    npu, torch = package_folder("torch_npu"), package_folder("torch")
    own = [*sorted((npu / "lib").glob("*.so")), *sorted(npu.glob("_C*.so"))]
    own += sorted((npu / "dynamo" / "torchair" / "core").glob("*.so"))
    available = [*(torch / "lib").glob("*.so*"), *own]
    names = {path.name for path in available}
    defined = set().union(*map(_defined, available))
    needed = {library for path in own for library in _needed(path)} - names
    undefined = set().union(*map(_undefined, own)) - defined
    words = set(tool("strings", "-n", "5", npu / "lib" / "libtorch_npu.so").splitlines())
    operators = {word for word in words if _OPERATOR_NAME.fullmatch(word)}
    operators |= {f"{name}GetWorkspaceSize" for name in operators if not name.endswith("GetWorkspaceSize")}
    looked_up = {word for word in words if _RUNTIME_NAME.fullmatch(word)} - operators
    return Missing(
        sorted(name for name in needed if not _SYSTEM_LIBRARY.match(name)),
        sorted((undefined - _in_process(undefined) - operators) | (looked_up - defined)),
        sorted(operators),
    )
