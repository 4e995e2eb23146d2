# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from adaflash.engine.tokenizer import Tokenizer, has_tokenizer
from adaflash.errors import CheckpointError, RequestError
from adaflash.request import ChatMessage
from tests.tiny_tokenizer import vocabulary, write_byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_level_tokenizer(directory)
    return Tokenizer(directory)


def test_sizes_and_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(vocabulary())
    assert tokenizer.eos_token_id == 2
    assert tokenizer.is_byte_level
    assert has_tokenizer(tokenizer.directory)


def test_chat_ends_where_the_reply_begins(tokenizer: Tokenizer) -> None:
    messages = [ChatMessage("system", "be brief"), ChatMessage("user", "hello")]
    text = tokenizer.decode(tokenizer.render_chat(messages), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "field"),
    [([], "messages"), ([ChatMessage("narrator", "hi")], "role"), ([ChatMessage("user\n", "hi")], "role")],
)
def test_bad_conversations_are_request_errors(tokenizer: Tokenizer, messages: list[ChatMessage], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat(messages)
    assert caught.value.field == field


def test_template_that_refuses_is_a_request_error(tmp_path: Path) -> None:
    write_byte_level_tokenizer(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        Tokenizer(tmp_path).render_chat([ChatMessage("user", "hi")])


def test_model_without_template_refuses_chat(tmp_path: Path) -> None:
    write_byte_level_tokenizer(tmp_path, None)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(tmp_path).render_chat([ChatMessage("user", "hi")])


def test_lone_surrogate_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_missing_or_broken_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Tokenizer(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        Tokenizer(tmp_path)
    write_byte_level_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match="cannot load the tokenizer"):
        Tokenizer(tmp_path)
