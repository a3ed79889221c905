"""A fleet file asks pip for packages by name; nothing in it makes pip read a file, open an address or run a command."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import InvalidRequirement, Requirement

from cluster.environments.requirements import is_plain_requirement
from cluster.errors import SpecError
from cluster.fleet.fleet_spec import parse_fleet

TAKEN = (
    "torch", "torch==2.9.0", "a == 2.9.0+cpu", "ray[default,serve]>=2.9,<3", "Pillow~=10.1", "a!=1.*", "x==1!2.0rc1",
    "numpy>=1.26 ; python_version < '3.13' and sys_platform == \"linux\"", "nvidia-ml-py>=12", "zope.interface",
    "a==1.0.post1.dev2", "pywin32; os_name in 'nt'", "torch>2.9.0a0",
)  # fmt: skip
REFUSED = (
    "evil @ git+https://example.org/evil", "git+https://example.org/evil.git", "evil @ https://example.org/evil.whl",
    "https://example.org/evil.whl", "file:///tmp/evil", "evil @ file:///tmp/evil", "evil@/tmp/evil", "./evil",
    "../evil", "/tmp/evil", "evil.whl", "evil.zip", "evil.tar.gz[x]", "evil==1.0.zip", "-e .", "-r /etc/passwd", "-c x",
    "--index-url https://example.org", "torch --index-url https://example.org", "torch --config-settings=--x=y",
    "torch --global-option=x", "torch --hash=sha256:00", "torch==1 -r x", "torch==${HOME}", "${EVIL}", "$(touch x)",
    "torch==1\\", "torch==\n1", "torch;os_name\n=='a'", "torch\\\n-r x", "torch\n-r x", "torch\r-r x",
    "torch\x0b-r x", "torch\u2028-r x", "torch # -r x",
    "torch;-r x", "torch; python_version", "torch; extra == 'x' --index-url y", "torch; 'a' == '$(x)'", "", " ",
    "torch==", "torch=2", "torch===any", "torch==abc", "a" * 501, "\x00torch", "t\u00f6rch", "torch[", "torch[;]",
    "torch@1", "torch ~= 1", "torch>=1+cpu",
)  # fmt: skip


def fleet(line):
    return {"pools": {"a": {"backend": "cpu", "environment": {"requirements": [line]}}}}


@pytest.mark.parametrize("line", TAKEN)
def test_packages_by_name_and_version_are_taken(line):
    assert parse_fleet(fleet(line)).pools["a"].environment.requirements == (line,)
    assert Requirement(line).url is None


@pytest.mark.parametrize("line", REFUSED)
def test_anything_else_is_refused_where_it_is_written(line):
    with pytest.raises(SpecError, match=r"pools\.a\.environment\.requirements: .* is not a requirement"):
        parse_fleet(fleet(line))


TOKENS = (
    "torch", "a-b", "==", "1.0", "2.*", "[x]", ",", ";", " ", "@", "git+", "file:", "--", "-r", "${X}", "\\", "\n",
    "python_version", "'3'", "and", "<", "not in", "(", ")", ".whl", "#", "://", "\t", "~=", "+cpu", "!", "=", "\x1c",
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.lists(st.sampled_from(TOKENS), max_size=12).map("".join), st.text(max_size=60)))
def test_what_is_taken_is_what_packaging_reads_as_a_name_with_versions(text):
    if is_plain_requirement(text):
        try:
            assert Requirement(text.strip(" ")).url is None
        except InvalidRequirement as e:
            raise AssertionError(f"{text!r}: {e}") from None
        assert "\n" not in text and "-r" not in text.split()
