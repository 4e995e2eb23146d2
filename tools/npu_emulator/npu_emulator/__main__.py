# SPDX-License-Identifier: Apache-2.0
"""`python -m npu_emulator build` and `python -m npu_emulator run [options] -- COMMAND...`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from npu_emulator import settings
from npu_emulator.binaries import BuildError
from npu_emulator.stubs import build


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="npu_emulator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the stub libraries and print their folder")
    run = commands.add_parser("run", help="run a command on emulated devices")
    run.add_argument("--devices", default="1", metavar="N", help="how many devices there are (default 1)")
    run.add_argument("--soc", metavar="NAME", help="name of the SoC (default Ascend910_9391, an Atlas A3)")
    run.add_argument("--memory", metavar="BYTES", help="memory of each device (default 4 GiB)")
    run.add_argument("--lift", default="", metavar="LIMITS", help=f"do not check these: {', '.join(settings.LIFTS)}")
    run.add_argument("--trace", metavar="FILE", help="write what the process did on the device to FILE, as JSON")
    run.add_argument("program", nargs="+", metavar="COMMAND", help="the command, after --")
    return parser


def environment(options: argparse.Namespace, libraries: Path) -> dict[str, str]:
    """The variables of an emulated process.

    Raises:
        settings.SettingError: An option is wrong.
    """
    settings.whole("--devices", options.devices, 0, settings.MAX_DEVICES)
    settings.lifts(options.lift)
    if options.memory:
        settings.whole("--memory", options.memory, 1 << 20, 1 << 50)
    given = {settings.SOC: options.soc, settings.MEMORY: options.memory, settings.TRACE: options.trace}
    given = {name: value for name, value in given.items() if value}
    given |= {settings.ENABLED: "1", settings.DEVICES: options.devices, settings.LIFT: options.lift}
    given["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(libraries), os.environ.get("LD_LIBRARY_PATH"))))
    # Operators are launched by the calling thread, not by torch_npu's own: kernels are Python, and order is exact.
    given["NPU_EMULATOR_PID"] = str(os.getpid())  # the command becomes this process
    given["TASK_QUEUE_ENABLE"] = "0"
    inherited = {name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"}  # of a real CANN
    return {**inherited, **given}


def main() -> int:
    """Run the command line; `run` does not return."""
    options = _parser().parse_args()
    try:
        libraries = build()
        if options.command == "build":
            print(libraries)
            return 0
        variables = environment(options, libraries)
    except (BuildError, settings.SettingError) as error:
        print(f"npu_emulator: {error}", file=sys.stderr)
        return 2
    try:
        os.execvpe(options.program[0], options.program, variables)
    except OSError as error:
        print(f"npu_emulator: {options.program[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
