# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from adaflash.cli import train, trainer
from adaflash.cli.main import main
from adaflash.cli.trainer import CheckpointPair, TrainerConfigs, configs_from
from adaflash.engine.engine import Engine
from adaflash.errors import ConfigError
from adaflash.training.trainer_config import TrainerConfig
from adaflash.training.training_data import TokenSample, TrainingData
from tests.engines import TinySetup, transformers_greedy


def parse(*argv: str, environ: dict[str, str] | None = None) -> TrainerConfigs:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    trainer.add_parser(parser.add_subparsers())
    return configs_from(parser.parse_args(["trainer", *argv]), environ or {})


def test_a_trainer_has_defaults_of_its_own() -> None:
    configs = parse()
    assert configs.server.grpc_port == 50052
    assert configs.server.max_message_bytes == 256 << 20
    assert configs.trainer == TrainerConfig(freeze_context=True)
    assert not parse("--no-freeze-context").trainer.freeze_context


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trainer.yaml"
    path.write_text("lr: 0.1\nalpha: 0.3\ngrpc-port: 1\nloss: ce\n")
    environ = {"ADAFLASH_ALPHA": "0.4", "ADAFLASH_GRPC_PORT": "2", "ADAFLASH_API_KEY": "secret"}
    configs = parse("--config", str(path), "--grpc-port", "3", "--draft", "d", "model", environ=environ)
    assert (configs.trainer.lr, configs.trainer.alpha, configs.trainer.loss) == (0.1, 0.4, "ce")
    assert (configs.trainer.model, configs.trainer.draft) == ("model", "d")
    assert (configs.server.grpc_port, configs.server.api_key) == (3, "secret")


def test_a_model_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model is given twice"):
        parse("one", "--model", "two")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trainer", "--lrr", "3"], "unknown flag '--lrr' (did you mean '--lr'?)"),
        (["trainer", "--alpha", "3"], "alpha=3.0 is invalid: must be in [0, 1]"),
        (["trainer", "/nowhere"], "a drafter is needed for model='/nowhere': give --draft"),
        (["trainer", "--max-num-waiting", "3"], "unknown flag '--max-num-waiting'"),
        (["train", "--output", "/new"], "--data is needed"),
        (["train", "--data", "/nowhere"], "--output is needed"),
        (["train", "--data", "/nowhere", "--output", "/tmp"], "output='/tmp' exists: must be a new directory"),
        (["train", "--data", "/nowhere", "--output", "/new"], "data='/nowhere' cannot be read"),
        (["train", "--data", "d", "--output", "/new", "--max-tokens", "1"], "max_tokens=1 is invalid: must be >= 2"),
        (["train", "--data", "d", "--output", "/new", "--spool", "s"], "unknown flag '--spool'"),
    ],
)
def test_a_usage_error_says_what_is_wrong(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaflash.cli.console.configure_logging", lambda level: None)
    assert main([*argv, "--grpc-port", "0"] if argv[1] == "/nowhere" else argv) == 2
    assert message in capsys.readouterr().err


def test_a_variable_of_the_trainer_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADAFLASH_RECENCY_TOKENS", "0")
    assert main(["trainer"]) == 2
    assert "recency_tokens=0 is invalid" in capsys.readouterr().err
    monkeypatch.setenv("ADAFLASH_RECENCI_TOKENS", "0")
    assert main(["trainer"]) == 2
    assert "(did you mean 'ADAFLASH_RECENCY_TOKENS'?)" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["trainer", "train"])
def test_help_imports_no_torch(command: str) -> None:
    code = (
        "import sys\n"
        "from adaflash.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'grpc', 'transformers') if name in sys.modules])"
    )
    argv = [sys.executable, "-c", code, command, "--help"]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "[]"


def test_prompts_are_answered_by_the_target_before_training(
    tiny_setup: Callable[[str], TinySetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Engine] = []
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine))
    setup = tiny_setup("qwen3")
    prompts: list[list[int]] = [[5, 17, 29], [41, 7]]
    data = TrainingData([TokenSample([1, 2, 3], 1)], [*prompts])
    directories = CheckpointPair(setup.target, setup.drafters["random"])
    answered = train._answered(data, TrainerConfig(device="cpu"), directories, max_tokens=6)
    expected = [[*prompt, *transformers_greedy(setup.model, prompt, 6)] for prompt in prompts]
    assert len(closed) == 1, "what it learned about costs is kept"
    assert answered == [TokenSample(ids, len(prompt)) for ids, prompt in zip(expected, prompts, strict=True)]
