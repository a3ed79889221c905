import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.protocol.redaction import Redactor

SECRET = 'p@ss "word"/2'


@pytest.mark.parametrize(
    "form", [SECRET, quote(SECRET, safe=""), json.dumps(SECRET), base64.b64encode(SECRET.encode()).decode()]
)
def test_a_secret_is_found_in_the_forms_it_is_usually_printed_in(form):
    assert "***" in Redactor([SECRET])(f"before {form} after")
    assert form.strip('"=') not in Redactor([SECRET])(f"before {form} after")


def test_the_lines_of_a_key_file_are_secrets_themselves():
    key = "-----BEGIN KEY-----\nabcdefghijkl\nab\n-----END KEY-----"
    assert Redactor([key])("got abcdefghijkl, ab") == "got ***, ab"


def test_of_two_secrets_that_overlap_the_longer_goes_first():
    assert Redactor(["abcd", "abcdef"])("abcdef abcd") == "*** ***"


def test_without_secrets_nothing_changes():
    assert Redactor([])("text") == "text"
    assert Redactor([""])("text") == "text"


def test_nested_data_is_redacted_and_keeps_its_shape():
    data = {"s3cr3t": [1, None, {"a": "is s3cr3t"}], "b": 2.5}
    assert Redactor(["s3cr3t"]).clean_data(data) == {"***": [1, None, {"a": "is ***"}], "b": 2.5}


@given(st.text(min_size=4).filter(lambda s: "*" not in s), st.text(), st.text())
def test_no_text_keeps_a_secret(secret, before, after):
    assert secret not in Redactor([secret])(before + secret + after).replace("***", "\0")
