# SPDX-License-Identifier: Apache-2.0
import argparse
import json
import re
import subprocess
import sys

import pytest

from adaflash.cli import generate
from adaflash.cli.main import COMMANDS, main


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--max-model-lenn", "3"], "unknown flag '--max-model-lenn' (did you mean '--max-model-len'?)"),
        (["serve", "--max-model", "3"], "unknown flag '--max-model'"),
        (["srve"], "unknown command 'srve' (did you mean 'serve'?)"),
        (["serve", "--max-num-seqs", "0"], "max_num_seqs=0 is invalid"),
        (["serve", "model", "extra"], "unexpected argument 'extra'"),
        (["serve", "--ssl-certfile", "/nowhere"], "ssl_certfile and ssl_keyfile go together"),
        (["serve", "--host", "192.0.2.1", "--grpc-port", "0", "--model", "/nowhere"], "host='192.0.2.1' is invalid"),
        (["generate", "hi", "--temperature", "-1"], "temperature=-1.0 is invalid"),
        (["generate", "hi", "--system", "s"], "--system has no effect without --chat"),
        (["generate", "hi", "--address", "localhost:1", "--dtype", "float32"], "dtype has no effect with --address"),
        (["generate", "hi", "--api-key", "k"], "have no effect without --address"),
    ],
)
def test_a_usage_error_says_what_is_wrong_and_exits_with_2(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_an_unknown_environment_variable(command, capsys, monkeypatch):
    monkeypatch.setenv("ADAFLASH_VERFIY_POLICY", "off")
    assert main([command]) == 2
    assert "'ADAFLASH_VERFIY_POLICY' (did you mean 'ADAFLASH_VERIFY_POLICY'?)" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["serve", "--max-num-seqs", "x"], ["serve", "--dtype", "int8"], []])
def test_a_value_of_the_wrong_type_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2


@pytest.mark.parametrize(
    ("flag", "text", "allowed"),
    [
        ("--max-tokens", "nnone", "must be an integer or none"),
        ("--max-num-seqs", "x", "must be an integer"),
        ("--min-p", "x", "must be a number"),
        *(
            ("--logit-bias", text, 'must be a JSON object such as {"5": -1.5} or none')
            for text in ("x", "[]", '{"a": 1}')
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_answered_with_what_is_allowed(flag, text, allowed, capsys):
    with pytest.raises(SystemExit):
        main(["generate", "hi", flag, text])
    assert f"argument {flag}" in (err := capsys.readouterr().err)
    assert err.rstrip().endswith(f"{text!r} is invalid: {allowed}")


def test_help_of_generate_shows_the_limit_that_generate_uses(capsys):
    parser = argparse.ArgumentParser()
    generate.add_parser(parser.add_subparsers())
    params = generate.params_from(parser.parse_args(["generate", "hi"]))
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    (shown,) = re.findall(r"--max-tokens TOKENS\s[^-]*\(default:\s+(\d+)\)", capsys.readouterr().out)
    assert int(shown) == params.max_tokens
    assert generate.params_from(parser.parse_args(["generate", "hi", "--max-tokens", "none"])).max_tokens is None


def test_an_unreachable_server_exits_with_1(capsys):
    assert main(["generate", "hi", "--address", "127.0.0.1:1"]) == 1
    assert "adaflash: error:" in capsys.readouterr().err


def test_help_imports_no_torch():
    code = (
        "import sys\n"
        "from adaflash.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'grpc', 'transformers') if name in sys.modules])"
    )
    for argv in (["--help"], ["serve", "--help"], ["generate", "--help"], ["doctor", "--help"]):
        result = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[-1] == "[]", argv
        assert "usage: adaflash" in result.stdout


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_doctor_reports_the_cpu_backend_as_json(capsys, monkeypatch):
    monkeypatch.setenv("ADAFLASH_API_KEY", "very-secret")
    assert main(["doctor", "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out)
    assert {backend["name"]: backend["problem"] for backend in report["backends"]}["cpu"] is None
    assert report["packages"]["torch"]
    assert "very-secret" not in out


@pytest.mark.parametrize(("device", "library"), [("cuda", "triton"), ("npu", "torch_npu")])
def test_doctor_lists_a_known_device_whose_backend_is_not_installed(device, library, capsys, monkeypatch):
    from adaflash.cli import doctor
    from adaflash.ops import registry

    installed = {name: entry for name, entry in registry.installed_backends().items() if name != device}
    monkeypatch.setattr(registry, "installed_backends", lambda: installed)
    monkeypatch.setattr(doctor, "_version_of", lambda package: None)
    assert main(["doctor", "--json"]) == 0
    (backend,) = [found for found in json.loads(capsys.readouterr().out)["backends"] if found["name"] == device]
    assert backend["source"] is None
    assert f"entry point {device!r}" in backend["problem"]
    assert library in backend["problem"]
    assert main(["doctor"]) == 0
    assert f"backend  {device} (absent): {backend['problem']}" in capsys.readouterr().out


def test_doctor_names_only_what_is_missing(capsys, monkeypatch):
    from adaflash.cli import doctor
    from adaflash.ops import registry

    cpu = {"cpu": registry.installed_backends()["cpu"]}
    monkeypatch.setattr(registry, "installed_backends", lambda: cpu)
    monkeypatch.setattr(doctor, "_version_of", lambda package: "1.0")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(line not in out for line in ("torch_npu is", "triton is"))


def test_doctor_says_why_a_backend_cannot_load(capsys, monkeypatch):
    from adaflash.errors import BackendError
    from adaflash.ops import registry

    def refuse(device):
        raise BackendError(f"device={device!r} cannot be loaded: no library")

    monkeypatch.setattr(registry, "load_backend", refuse)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "no library" in out
    assert "no backend can run here" in out
