"""Sizes in bytes that people write."""

import pytest

from cluster.errors import UserError
from cluster.input.sizes import size_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16 * 10**9),
        ("16GiB", 16 * 2**30),
        ("1.5 TiB", 3 * 2**39),
        ("512mb", 512 * 10**6),
        ("32GB+", 32 * 10**9),
    ],
)
def test_sizes_have_a_unit(text, size):
    assert size_bytes(text) == size


@pytest.mark.parametrize("value", [16, "16", "16G", "GB", "-1GB", "1e3GB", None, True])
def test_a_size_without_a_unit_is_refused(value):
    with pytest.raises(UserError, match="write a number and a unit"):
        size_bytes(value)
