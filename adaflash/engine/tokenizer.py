# SPDX-License-Identifier: Apache-2.0
"""The model's tokenizer, loaded from a local directory: text and chats to token ids, token ids to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from adaflash.errors import CheckpointError, RequestError
from adaflash.request import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")


def has_tokenizer(directory: Path) -> bool:
    """Return whether any tokenizer file lies in `directory`."""
    return any((directory / name).is_file() for name in _FILES)


class Tokenizer:
    """Encodes and decodes through the `tokenizers` backend of the model's own tokenizer; safe to share between threads.

    Args:
        directory: Folder with `tokenizer.json` (or files transformers can convert) and `tokenizer_config.json`.

    Raises:
        CheckpointError: The folder or its tokenizer is missing or unreadable.
    """

    def __init__(self, directory: str | Path) -> None:
        from tokenizers import decoders
        from transformers import AutoTokenizer

        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(f"tokenizer directory {str(directory)!r} does not exist")
        if not has_tokenizer(self.directory):
            raise CheckpointError(f"{directory} holds no tokenizer: none of {', '.join(_FILES)} is there")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(self.directory), local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError, json.JSONDecodeError) as error:
            raise CheckpointError(f"cannot load the tokenizer in {directory}: {error}") from error
        if not self._tokenizer.is_fast:
            raise CheckpointError(f"the tokenizer in {directory} has no `tokenizers` backend (tokenizer.json)")
        self._backend = self._tokenizer.backend_tokenizer
        self._special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._token_bytes: dict[int, bytes] = {}
        self.is_byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows, added tokens included; a model's padded vocabulary may be larger."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, if there is one."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return self._tokenizer.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with the model's own prefix (e.g. BOS) unless told otherwise.

        Raises:
            RequestError: The text is not valid Unicode (it holds lone surrogates).
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("prompt", text, "text that is valid Unicode") from error
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids outside the vocabulary give no text."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: list[ChatMessage]) -> list[int]:
        """Return the token ids of a conversation under the model's template, up to where the reply begins.

        Raises:
            RequestError: The model has no template, there is no message, a role is unknown, or the template refuses.
        """
        import jinja2

        if not self.has_chat_template:
            raise RequestError("messages", "a chat", "a plain prompt: this model has no chat template")
        if not messages:
            raise RequestError("messages", messages, "at least one message")
        for message in messages:
            if message.role not in CHAT_ROLES:
                raise RequestError("role", message.role, "one of " + ", ".join(CHAT_ROLES))
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestError("messages", turns, f"a conversation the chat template accepts: {error}") from error
        assert isinstance(text, str), "tokenize=False returns text"
        return self.encode(text, add_special_tokens=False)

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """Return the bytes one token adds to the text of a byte-level tokenizer; only if `is_byte_level`."""
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = _unmap_bytes(self._backend.id_to_token(token_id) or "")
            self._token_bytes[token_id] = found
        return found


def _byte_alphabet() -> dict[str, int]:
    """Return the byte each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_alphabet()


def _unmap_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; an added token with characters outside the alphabet is plain text."""
    mapped = [_BYTE_OF_CHARACTER.get(character) for character in token]
    known = [byte for byte in mapped if byte is not None]
    return bytes(known) if len(known) == len(mapped) else token.encode("utf-8")
