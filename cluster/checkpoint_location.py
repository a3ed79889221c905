"""Where a checkpoint is, as users and machines write it: POOL:PATH inside a pool's storage, or the URI of an object
store. The one parser of both, for the server, for nodes, and for tools on this machine.

A place that is neither is refused, never taken for a path: what is not on the list of schemes could otherwise be a
folder `x:` below wherever a process happens to stand. Errors do not repeat a user name, a password or a signature.
"""

import re
import unicodedata
from dataclasses import dataclass
from difflib import get_close_matches

from cluster.errors import SpecError, nearest

SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "abfss")
"""Object stores, the only places outside of a pool's storage that a node reads or writes for others."""
POOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", re.IGNORECASE | re.ASCII)
ADDRESS = re.compile(r"[0-9]+([.][0-9]+)+|0x[0-9a-f]+|localhost", re.IGNORECASE | re.ASCII)
LONGEST_BYTES = 1024
LONGEST_PART_BYTES = 255
MOST_FOLDERS = 64
UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")
"""Unicode's categories of control characters, halves of surrogate pairs, separators of lines and paragraphs."""
WILDCARDS = "?#*[]"
"""fsspec lists by patterns, and some stores read versions and signatures from behind a `?`."""
FORMS = "write POOL:PATH, e.g. cpu:digits-3f9a2c, or a store's s3://BUCKET/PREFIX"


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """`path` lies in the storage of `pool`, or, with a `scheme`, is BUCKET/PREFIX of an object store."""

    pool: str
    path: str
    scheme: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}" if self.scheme else f"{self.pool}:{self.path}"


@dataclass(frozen=True, slots=True)
class ToolPath:
    """What a tool does with one of its places: write it? May it be in a store? Is it a folder that is there, of which
    the newest checkpoint is meant, unless `whole`?
    """

    written: bool = False
    stores: bool = False
    whole: bool = False


TOOLS: dict[str, dict[str, ToolPath]] = {
    "verify": {"place": ToolPath(stores=True)},
    "diff": {"a": ToolPath(), "b": ToolPath()},
    "convert": {"source": ToolPath(), "root": ToolPath(written=True)},
    "prune": {"root": ToolPath(written=True, whole=True)},
    "pin": {"path": ToolPath()},
    "import": {"source": ToolPath(whole=True), "root": ToolPath(written=True)},
    "export": {"source": ToolPath(), "target": ToolPath(written=True)},
    "copy": {"source": ToolPath(stores=True), "target": ToolPath(written=True, stores=True)},
    "discard": {"path": ToolPath(written=True)},
    "look": {"source": ToolPath(stores=True)},
    "fetch": {"source": ToolPath(stores=True), "target": ToolPath(written=True)},
}
"""Tools that run on a node for a client, or for a copy of one: which arguments are places. All others are options."""


def parse_location(text: str, field: str = "checkpoint") -> CheckpointLocation:
    """POOL:PATH or the URI of an object store. Raises SpecError naming `field` and the nearest valid form."""
    return parse_uri(text, field) if is_uri(text) else parse_pool_path(text, field)


def is_uri(text: str) -> bool:
    """Whether it is written as one, valid or not: such a text is never a path."""
    return "://" in text


def parse_pool_path(text: str, field: str = "checkpoint", pool: str = "") -> CheckpointLocation:
    """POOL:PATH; PATH alone where there is a `pool` to take it for. Raises SpecError."""
    if is_uri(text):
        raise SpecError(field, f"{_shown(text)} is not in a pool's storage", "write POOL:PATH, e.g. cpu:digits-3f9a2c")
    named, colon, path = text.partition(":")
    if not colon and pool:
        named, path = pool, text
    elif not colon or not named:
        raise SpecError(field, f"{_shown(text)} names no pool", FORMS)
    if not POOL.fullmatch(named):
        raise SpecError(field, f"{_shown(named)} is not a pool's name", FORMS)
    plain = "/".join(part for part in path.split("/") if part not in ("", "."))
    if path.startswith("/") or (refusal := path_error(plain)):
        why = "it is absolute" if path.startswith("/") else refusal
        raise SpecError(
            field,
            f"path {_shown(path)} is not inside the pool's storage: {why}",
            f"write it relative to the storage, without `..`: {named}:{_near(path)}",
        )
    return CheckpointLocation(named, plain)


def parse_uri(text: str, field: str = "checkpoint", more: tuple[str, ...] = ()) -> CheckpointLocation:
    """SCHEME://BUCKET/PREFIX of the schemes that are listed, or of `more`. Raises SpecError.

    The bucket is a name, no address; credentials come from the environment of whoever reaches the store.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        raise SpecError(field, f"{_shown(text)} is not an object store's place", FORMS)
    if scheme not in (*SCHEMES, *more):
        known = [s for s in SCHEMES if s == scheme.lower()] or get_close_matches(scheme.rpartition("::")[2], SCHEMES, 1)
        remedy = nearest(known[0] if known else scheme[:20], SCHEMES)
        raise SpecError(field, f"{_shown(text)} has the scheme {_shown(scheme)}, not an object store's", remedy)
    plain = rest.rstrip("/")
    if refusal := _store_refusal(plain, scheme in SCHEMES):
        raise SpecError(
            field, f"{_shown(text)} is no plain place in a store: {refusal}", f"write {scheme}://BUCKET/PREFIX"
        )
    return CheckpointLocation("", plain, scheme)


def path_error(path: str) -> str:
    """Why `path` is not relative, with `/`, below some folder; "" when it is. Lengths are those that Linux takes."""
    parts = path.split("/")
    if not path:
        return "it is empty"
    if "\\" in path or any(unicodedata.category(char) in UNPRINTABLE for char in path):
        return "it holds a backslash or a control character"
    if any(part in ("", ".", "..") for part in parts):
        return "it has an empty part, `.` or `..`"
    sizes = [len(part.encode()) for part in parts]
    if sum(sizes) + len(sizes) > LONGEST_BYTES or max(sizes) > LONGEST_PART_BYTES or len(parts) > MOST_FOLDERS:
        return "it is too long"
    return ""


def _store_refusal(path: str, named: bool) -> str:
    bucket = path.partition("/")[0]
    if "@" in bucket:
        return "a user name or password belongs into the environment"
    if "::" in path or "://" in path or any(char in WILDCARDS for char in path):
        return f"it holds `::`, `://` or one of {WILDCARDS}"
    if named and (not BUCKET.fullmatch(bucket) or ADDRESS.fullmatch(bucket)):
        return "BUCKET must be a name of letters, digits, `-`, `_` and `.`"
    return path_error(path)


def _near(path: str) -> str:
    """What was probably meant."""
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    kept = ("".join(c for c in part if unicodedata.category(c) not in UNPRINTABLE) for part in parts)
    near = "/".join(part for part in kept if part)
    return near if near and not path_error(near) else "digits-3f9a2c"


def _shown(text: str) -> str:
    """For an error: without what stands before an `@` or behind a `?`, which may be secrets."""
    scheme, separator, rest = text.rpartition("://")
    _, at, host = rest.rpartition("@")
    place, mark, _ = (host if at and separator else rest).partition("?")
    hidden = f"{scheme}{separator}{'…@' if at and separator else ''}{place}{'?…' if mark else ''}"
    return repr(hidden if len(hidden) <= 200 else f"{hidden[:200]}…")
