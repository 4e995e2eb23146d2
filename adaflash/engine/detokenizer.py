# SPDX-License-Identifier: Apache-2.0
"""Turns one sample's tokens into text while they are generated, and finds stop strings in it.

The engine pushes committed tokens one by one; after a `StopMatch` nothing more is pushed. Text is independent of how
the tokens were grouped into steps. A token that completes a stop id is pushed only when its text shall be kept.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from adaflash.engine.tokenizer import Tokenizer
from adaflash.request import SamplingParams

_REPLACEMENT = "\ufffd"
# Enough of the prompt for decoders that treat the first token of a text differently (a stripped leading space).
_NUM_CONTEXT_TOKENS = 6


class StopMatch(NamedTuple):
    """A stop string was completed by the token just pushed."""

    stop: str


class Detokenizer:
    """Text of one sample so far: incremental, valid Unicode, cut at the first stop string.

    A stop string counts when it ends in text of a token after the first `min_tokens`; of several, the one that is
    complete first. Text that may be the beginning of a stop string is not handed out before that is decided.

    Args:
        tokenizer: The model's tokenizer.
        params: Stop strings, `min_tokens`, `include_stop_str_in_output`, `skip_special_tokens`.
        prompt_ids: The prompt; decoders that are not byte-level need its end as context.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        if tokenizer.is_byte_level:
            self._decoder: _TokenDecoder = _ByteLevelDecoder(tokenizer, params.skip_special_tokens)
        else:
            self._decoder = _WindowDecoder(tokenizer, params.skip_special_tokens, prompt_ids)
        self._stops = params.stop_strings
        # Every proper prefix of a stop string, longest first: `endswith` of all of them is one C call.
        prefixes = {stop[:length] for stop in self._stops for length in range(1, len(stop))}
        self._stop_prefixes = tuple(sorted(prefixes, key=len, reverse=True))
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []  # Stable text.
        self._num_taken = 0  # Pieces that `take_text` has handed out.
        self._held = ""  # May be the beginning of a stop string.
        self._num_exempt = 0  # Leading characters of `_held` that came with the first `min_tokens` tokens.
        self._finished = False

    @property
    def text(self) -> str:
        """All stable text so far; after `finish` or a match, the sample's whole text."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> StopMatch | None:
        """Add one committed token; return the match when it completed a stop string."""
        assert not self._finished, "a finished sample takes no more tokens"
        self._num_tokens += 1
        piece = self._decoder.feed(token_id)
        if not piece:
            return None
        if not self._stops:
            self._pieces.append(piece)
            return None
        return self._scan(self._held + piece)

    def take_text(self) -> str:
        """Return the stable text that was not returned before."""
        taken = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return taken

    def finish(self) -> None:
        """Release text that was held back: no more tokens come. Does nothing after a match."""
        if not self._finished:
            self._finished = True
            self._pieces.append(self._held + self._decoder.flush())
            self._held = ""

    def _scan(self, window: str) -> StopMatch | None:
        """Look for a stop string in the undecided text; keep back what may still become one."""
        counts = self._num_tokens > self._min_tokens
        num_exempt = self._num_exempt if counts else len(window)
        match = self._first_match(window, num_exempt) if counts else None
        if match is not None:
            self._finished = True
            self._pieces.append(window[: match.end if self._include_stop else match.start])
            self._held = ""
            return StopMatch(match.stop)
        stable = len(window)
        if window.endswith(self._stop_prefixes):
            stable -= next(len(prefix) for prefix in self._stop_prefixes if window.endswith(prefix))
        if stable:
            self._pieces.append(window[:stable])
        self._held = window[stable:]
        self._num_exempt = max(0, num_exempt - stable)
        return None

    def _first_match(self, window: str, num_exempt: int) -> _Match | None:
        """Return the stop string that is complete first and ends after the exempt characters."""
        matches = []
        for stop in self._stops:
            start = window.find(stop, max(0, num_exempt - len(stop) + 1))
            if start >= 0:
                matches.append(_Match(start + len(stop), start, stop))
        return min(matches) if matches else None


class _Match(NamedTuple):
    end: int
    start: int
    stop: str


class _TokenDecoder(Protocol):
    def feed(self, token_id: int) -> str:
        """Return the text that became certain with this token."""

    def flush(self) -> str:
        """Return the text of what is left incomplete."""


class _ByteLevelDecoder:
    """Exact for byte-level tokenizers: their text is the UTF-8 decoding of the tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id, self._skip_special_tokens))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Any other tokenizer: decodes a short window before and after a token and returns the difference.

    Text that ends in U+FFFD is held, it may be half a character. A decoder that reinterprets earlier bytes after an
    invalid one cannot be followed: what was handed out stays.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_ids[-_NUM_CONTEXT_TOKENS:])  # Tokens of the last piece, then undecided ones.
        self._num_decided = len(self._window)
        self._decided_text = self._decode(self._window)

    def feed(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return ""
        piece = text[len(self._decided_text) :]
        if piece:
            del self._window[: self._num_decided]
            self._num_decided = len(self._window)
            self._decided_text = self._decode(self._window)
        return piece

    def flush(self) -> str:
        return self._decode(self._window)[len(self._decided_text) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)
