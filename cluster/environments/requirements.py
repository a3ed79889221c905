"""Check requirements of a pool's environment: packages of the index by name and version, nothing else.

pip's requirements files allow more: options (`--index-url`, `-e`, `--config-settings`), further files, URLs, paths,
environment variables. Any of them would run or read something that the fleet file does not show, so this is the grammar
of PEP 508 without its URLs. Version: PEP 440, appendix B. Standard library only; every part matches in linear time.
"""

import re

MAX_LINE_LENGTH = 500
_VERSION = (
    r"v?(?:[0-9]+!)?[0-9]+(?:\.[0-9]+)*(?:[-_.]?(?:alpha|beta|preview|pre|a|b|c|rc)[-_.]?[0-9]*)?"
    r"(?:-[0-9]+|[-_.]?(?:post|rev|r)[-_.]?[0-9]*)?(?:[-_.]?dev[-_.]?[0-9]*)?"
)
_LOCAL = r"(?:\+[a-z0-9]+(?:[-_.][a-z0-9]+)*)?"
_CLAUSE = (
    rf"(?:(?:==|!=)[ \t]*(?:v?(?:[0-9]+!)?[0-9]+(?:\.[0-9]+)*\.\*|{_VERSION}{_LOCAL})"
    rf"|~=[ \t]*(?=v?(?:[0-9]+!)?[0-9]+\.[0-9]){_VERSION}|(?:<=|>=|<|>)[ \t]*{_VERSION})"
)
_NAME = r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?"
REQUIREMENT = re.compile(
    rf"(?P<name>{_NAME})[ \t]*(?:\[[ \t]*{_NAME}(?:[ \t]*,[ \t]*{_NAME})*[ \t]*\])?"
    rf"[ \t]*(?P<versions>{_CLAUSE}(?:[ \t]*,[ \t]*{_CLAUSE})*)?[ \t]*(?:;(?P<marker>.*))?",
    re.IGNORECASE | re.ASCII,
)
_VARIABLES = (
    *("python_version", "python_full_version", "os_name", "sys_platform", "platform_release", "platform_system"),
    *("platform_version", "platform_machine", "platform_python_implementation", "implementation_name"),
    "implementation_version",
)
_VALUE = rf"(?:{'|'.join(_VARIABLES)}|'[A-Za-z0-9 ._+-]*'|\"[A-Za-z0-9 ._+-]*\")"
_COMPARED = rf"{_VALUE}[ \t]*(?:===|==|~=|!=|<=|>=|<|>|in|not[ \t]+in)[ \t]*{_VALUE}"
MARKER = re.compile(rf"[ \t]*{_COMPARED}(?:[ \t]+(?:and|or)[ \t]+{_COMPARED})*[ \t]*", re.ASCII)
ARCHIVE = re.compile(r"\.(?:zip|whl|tar|tgz|tbz|txz|tlz|gz|bz2|xz|lz|lzma)", re.IGNORECASE)
"""pip treats a requirement with one of these endings as a file if the current folder has a file of that name."""


def is_plain_requirement(text: str) -> bool:
    """Return whether `text` is NAME[EXTRAS] with versions and markers, on one line."""
    if len(text) > MAX_LINE_LENGTH or (match := REQUIREMENT.fullmatch(text.strip(" "))) is None:
        return False
    if ARCHIVE.search(match["name"]) or ARCHIVE.search(match["versions"] or ""):
        return False
    return match["marker"] is None or MARKER.fullmatch(match["marker"]) is not None
