# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.engine.detokenizer import Detokenizer
from adaflash.engine.tokenizer import Tokenizer
from adaflash.request import SamplingParams
from tests.tiny_tokenizer import vocabulary, write_byte_level_tokenizer, write_metaspace_tokenizer

NUM_TOKENS = len(vocabulary())
BYTE_IDS = {
    bytes([byte]): 3 + index for index, byte in enumerate([*range(33, 127), *range(161, 173), *range(174, 256)])
}
BYTE_IDS |= {
    bytes([byte]): 3 + 188 + index for index, byte in enumerate(b for b in range(256) if bytes([b]) not in BYTE_IDS)
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("byte-level")
    write_byte_level_tokenizer(directory)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("metaspace")
    write_metaspace_tokenizer(directory)
    return Tokenizer(directory)


def _params(
    stop: list[str] | None = None, *, include_stop: bool = False, min_tokens: int = 0, skip_special: bool = True
) -> SamplingParams:
    return SamplingParams(
        max_tokens=512,
        stop=stop,
        include_stop_str_in_output=include_stop,
        min_tokens=min_tokens,
        skip_special_tokens=skip_special,
    )


def _byte_ids(text: str) -> list[int]:
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


def _stream(detokenizer: Detokenizer, token_ids: list[int]) -> tuple[list[str], str | None]:
    """Push until a stop; returns the deltas and the stop string found."""
    deltas, stop = [], None
    for token_id in token_ids:
        match = detokenizer.push(token_id)
        deltas.append(detokenizer.take_text())
        if match is not None:
            stop = match.stop
            break
    detokenizer.finish()
    deltas.append(detokenizer.take_text())
    return deltas, stop


def _expected(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The specification, on the whole text at once: cut at the stop string that is complete first."""
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, start, stop = min(ends)
    return text[: end if include_stop else start], stop


@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=24), skip_special=st.booleans())
def test_any_tokens_stream_to_the_text_of_one_decode(
    tokenizer: Tokenizer, token_ids: list[int], skip_special: bool
) -> None:
    detokenizer = Detokenizer(tokenizer, _params(skip_special=skip_special), [])
    deltas, _ = _stream(detokenizer, token_ids)
    assert "".join(deltas) == detokenizer.text == tokenizer.decode(token_ids, skip_special)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=16))
def test_characters_split_over_tokens_appear_whole(tokenizer: Tokenizer, text: str) -> None:
    deltas, _ = _stream(Detokenizer(tokenizer, _params(), []), _byte_ids(text))
    assert "".join(deltas) == text
    for delta in deltas[:-1]:
        assert "\ufffd" not in delta or "\ufffd" in text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abé", max_size=24),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=3),
    include_stop=st.booleans(),
)
def test_stop_strings_cut_at_the_first_that_is_complete(
    tokenizer: Tokenizer, text: str, stops: list[str], include_stop: bool
) -> None:
    detokenizer = Detokenizer(tokenizer, _params(stops, include_stop=include_stop), [])
    deltas, stop = _stream(detokenizer, _byte_ids(text))
    assert ("".join(deltas), stop) == _expected(text, stops, include_stop)
    assert detokenizer.text == "".join(deltas)


@pytest.mark.parametrize("offset", range(10))
@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_string_is_found_at_every_offset(tokenizer: Tokenizer, offset: int, include_stop: bool) -> None:
    text = "x" * offset + "hello" + "y" * 5
    for token_ids in (tokenizer.encode(text), _byte_ids(text)):
        detokenizer = Detokenizer(tokenizer, _params(["ello"], include_stop=include_stop), [])
        deltas, stop = _stream(detokenizer, token_ids)
        assert stop == "ello"
        assert "".join(deltas) == "x" * offset + ("hello" if include_stop else "h")


def test_text_that_may_become_a_stop_string_is_held_until_decided(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, _params(["abcd"]), [])
    deltas, stop = _stream(detokenizer, _byte_ids("xababc"))
    assert stop is None
    assert deltas == ["x", "", "", "ab", "", "", "abc"]


def test_finish_releases_half_a_character(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, _params(), [])
    deltas, _ = _stream(detokenizer, _byte_ids("é")[:1])
    assert deltas == ["", "\ufffd"]


def test_stop_string_within_the_first_min_tokens_is_ignored(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, _params(["ab"], min_tokens=3), [])
    deltas, stop = _stream(detokenizer, _byte_ids("ababab"))
    assert stop == "ab"
    assert "".join(deltas) == "ab"  # The second one ends in token 4, beyond the first three.
    detokenizer = Detokenizer(tokenizer, _params(["ab"], min_tokens=4), [])
    assert "".join(_stream(detokenizer, _byte_ids("ababab"))[0]) == "abab"


def test_stop_string_that_begins_within_min_tokens_and_ends_after_counts(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, _params(["abc"], min_tokens=2), [])
    deltas, stop = _stream(detokenizer, _byte_ids("abcd"))
    assert stop == "abc"
    assert "".join(deltas) == ""


def test_special_tokens_can_be_kept(tokenizer: Tokenizer) -> None:
    token_ids = [1, *_byte_ids("a"), 2]
    assert "".join(_stream(Detokenizer(tokenizer, _params(), []), token_ids)[0]) == "a"
    kept = "".join(_stream(Detokenizer(tokenizer, _params(skip_special=False), []), token_ids)[0])
    assert kept == "<|im_start|>a<|im_end|>"


def test_ids_beyond_the_vocabulary_give_no_text(tokenizer: Tokenizer) -> None:
    assert "".join(_stream(Detokenizer(tokenizer, _params(), []), [NUM_TOKENS + 50])[0]) == ""


def test_nothing_is_pushed_after_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, _params(["a"]), [])
    detokenizer.push(_byte_ids("a")[0])
    with pytest.raises(AssertionError, match="takes no more tokens"):
        detokenizer.push(_byte_ids("a")[0])


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.text(alphabet="hello wé", max_size=10), output=st.text(alphabet="hello w日🙂", min_size=1, max_size=20)
)
def test_other_tokenizers_continue_the_prompt(metaspace: Tokenizer, prompt: str, output: str) -> None:
    assert not metaspace.is_byte_level
    prompt_ids, all_ids = metaspace.encode("h" + prompt), metaspace.encode("h" + prompt + output)
    if all_ids[: len(prompt_ids)] != prompt_ids:
        return  # The output merged into the prompt's last token: not a continuation.
    detokenizer = Detokenizer(metaspace, _params(), prompt_ids)
    deltas, _ = _stream(detokenizer, all_ids[len(prompt_ids) :])
    assert "".join(deltas) == detokenizer.text == output


def test_leading_space_survives_in_other_tokenizers(metaspace: Tokenizer, tmp_path: Path) -> None:
    world = metaspace.encode("hello w")[1:]
    detokenizer = Detokenizer(metaspace, _params(), metaspace.encode("hello"))
    assert "".join(_stream(detokenizer, world[-1:])[0]) == " w"
