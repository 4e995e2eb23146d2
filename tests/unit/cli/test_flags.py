# SPDX-License-Identifier: Apache-2.0
import argparse
import dataclasses
import inspect

import pytest

from adaflash.cli import serve
from adaflash.cli.flags import attribute_docs, flags_of
from adaflash.config import EngineConfig, OnlineConfig, ServerConfig
from adaflash.errors import ConfigError
from adaflash.request import SamplingParams


def _configs(argv, environ=None):
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return serve.configs_from(parser.parse_args(["serve", *argv]), environ or {})


@pytest.mark.parametrize("config_class", [EngineConfig, ServerConfig, OnlineConfig, SamplingParams])
def test_every_field_has_a_flag_with_help(config_class):
    fields = {field.name for field in dataclasses.fields(config_class)}
    assert {flag.field for flag in flags_of(config_class)} == fields
    assert set(attribute_docs(config_class)) == fields


def test_nothing_given_is_the_defaults():
    assert _configs([]) == (EngineConfig(), ServerConfig(), OnlineConfig())


def test_flags_are_typed():
    argv = "m --max-model-len 128 --gpu-memory-utilization 0.5 --strict-ops --no-enable-prefix-caching"
    argv += " --verify-policy fixed --draft d --grpc-port 0 --metrics-port 9100"
    engine, server, _ = _configs(argv.split())
    assert (engine.model, engine.max_model_len, engine.gpu_memory_utilization) == ("m", 128, 0.5)
    assert (engine.strict_ops, engine.enable_prefix_caching) == (True, False)
    assert (engine.verify_policy, engine.draft) == ("fixed", "d")
    assert (server.grpc_port, server.metrics_port) == (0, 9100)


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--model", "m"], "model", "m"),
        (["--model-path", "m"], "model", "m"),
        (["--context-length", "64"], "max_model_len", 64),
        (["--max-running-requests", "3"], "max_num_seqs", 3),
        (["--mem-fraction-static", "0.4"], "gpu_memory_utilization", 0.4),
        (["--speculative-draft-model-path", "d"], "draft", "d"),
    ],
)
def test_spellings_of_other_servers_are_known(argv, field, value):
    assert getattr(_configs(argv)[0], field) == value


def test_command_line_beats_environment_beats_file_beats_default(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("max-num-seqs: 1\nmax_model_len: 2\nblock-size: 3\nhost: 127.0.0.2\n")
    environ = {"ADAFLASH_MAX_NUM_SEQS": "10", "ADAFLASH_MAX_MODEL_LEN": "20", "ADAFLASH_HOST": "127.0.0.3"}
    engine, server, _ = _configs(["--config", str(path), "--max-num-seqs", "100"], environ)
    assert (engine.max_num_seqs, engine.max_model_len, engine.block_size) == (100, 20, 3)
    assert engine.max_num_batched_tokens == EngineConfig().max_num_batched_tokens
    assert server.host == "127.0.0.3"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-model-lenn: 3", "unknown key 'max-model-lenn'.*'max-model-len'"),
        ("max-num-seqs: many", "max-num-seqs='many' is invalid: must be an integer"),
        ("strict-ops: 1", "strict-ops=1 is invalid: must be true or false"),
        ("verify-policy: best", "must be one of auto, off"),
        ("max-num-seqs: true", "must be an integer"),
        ("model: a\nmodel-path: b", "twice"),
        ("- a\n- b", "must hold"),
        ("a: [", "cannot be read"),
        ("shutdown-timeout-s: soon", "must be a number"),
        ("max-model-len: nnone", "max-model-len='nnone' is invalid: must be an integer or none"),
    ],
)
def test_a_bad_config_file_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        _configs(["--config", str(path)])


def test_a_missing_config_file_is_named():
    with pytest.raises(ConfigError, match="nowhere"):
        _configs(["--config", "/nowhere.yaml"])


@pytest.mark.parametrize("none", ["null", "none", "None"])
def test_null_and_none_in_a_config_file_mean_none(tmp_path, none):
    path = tmp_path / "config.yaml"
    path.write_text(f"max-model-len: {none}\nstream-stall-timeout-s: 5\n")
    engine, server, _ = _configs(["--config", str(path)])
    assert engine.max_model_len is None
    assert server.stream_stall_timeout_s == 5


def test_a_bad_environment_variable_is_named():
    with pytest.raises(ConfigError, match="ADAFLASH_MAX_NUM_SEQS='x' is invalid: must be an integer"):
        _configs([], {"ADAFLASH_MAX_NUM_SEQS": "x"})


def test_booleans_and_secrets_come_from_the_environment():
    engine, server, _ = _configs([], {"ADAFLASH_STRICT_OPS": "true", "ADAFLASH_API_KEY": "k"})
    assert (engine.strict_ops, server.api_key) == (True, "k")


def test_a_model_given_twice_is_refused():
    with pytest.raises(ConfigError, match="twice"):
        _configs(["a", "--model", "b"])


@dataclasses.dataclass
class Documented:
    """A config.

    Attributes:
        first: One
            thing.
        last: Another.

    Raises:
        ConfigError: Not part of any help.
    """

    first: int = 1
    last: int = 2


def test_help_of_the_last_field_ends_where_the_next_section_begins():
    assert attribute_docs(Documented) == {"first": "One thing.", "last": "Another."}


def test_help_is_found_whether_or_not_python_strips_the_docstring(monkeypatch):
    monkeypatch.setattr(Documented, "__doc__", inspect.cleandoc(Documented.__doc__))
    assert attribute_docs(Documented) == {"first": "One thing.", "last": "Another."}
