# SPDX-License-Identifier: Apache-2.0
import pytest

from adaflash.models.strict_json import parse_json


def test_json_is_parsed():
    assert parse_json('{"a": [1, 2.5, null, "é"], "b": {"a": true}}'.encode()) == {
        "a": [1, 2.5, None, "é"],
        "b": {"a": True},
    }


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1, "a": 1}', "the key 'a' is there twice"),
        (b'{"a": {"b": 1, "b": 2}}', "the key 'b' is there twice"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"),
        (b"[" * 100_000, "nests too deeply"),
        (b'{"a":' * 100_000, "nests too deeply"),
        (b'{"\\ud800": 1}', "surrogates not allowed"),
        (b'{"a": "\\udfff"}', "surrogates not allowed"),
        ('{"a": 1}'.encode("utf-16"), "codec can't decode"),
        (b"\xff", "codec can't decode"),
        (b"9" * 5000, "integer string"),
        (b"", "Expecting value"),
    ],
)
def test_what_is_not_strict_json_is_a_value_error(data, words):
    with pytest.raises(ValueError, match=words):
        parse_json(data)
