"""Location of a checkpoint: POOL:PATH in a pool's storage, or the URI of an object store.

This is the one parser of both, for the server, for nodes, and for tools on this machine. Any other text is refused,
never used as a path: an unknown scheme could otherwise be a folder `x:` below a process's current folder. Errors do not
repeat a user name, a password or a signature.
"""

import re
import unicodedata
from dataclasses import dataclass
from difflib import get_close_matches

from cluster.errors import SpecError, nearest

SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "abfss")
"""Schemes of object stores, the only locations outside a pool's storage that a node reads or writes for clients."""
POOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", re.IGNORECASE | re.ASCII)
ADDRESS = re.compile(r"[0-9]+([.][0-9]+)+|0x[0-9a-f]+|localhost", re.IGNORECASE | re.ASCII)
MAX_PATH_BYTES = 1024
MAX_PART_BYTES = 255
MAX_FOLDER_DEPTH = 64
UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories of control characters, surrogates, and line and paragraph separators."""
WILDCARDS = "?#*[]"
"""fsspec treats these as patterns, and some stores read versions and signatures from behind a `?`."""
FORMS = "write POOL:PATH, e.g. cpu:digits-3f9a2c, or a store's s3://BUCKET/PREFIX"


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """A path in the storage of `pool`, or, with a `scheme`, BUCKET/PREFIX of an object store."""

    pool: str
    path: str
    scheme: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}" if self.scheme else f"{self.pool}:{self.path}"


def reference_fields(pool: str, path: str) -> dict[str, str]:
    """`pool`, `path` and `ref` of a checkpoint, the fields by which every response names it.

    `ref` is the text that commands and verbs accept: POOL:PATH, or outside pools (`pool` is empty) `path` itself, the
    URI of an object store or a path of the user's machine.
    """
    return {"pool": pool, "path": path, "ref": f"{pool}:{path}" if pool else path}


def split_reference(ref: str) -> dict[str, str]:
    """The fields of `reference_fields` for POOL:PATH or a URI that our own code wrote."""
    pool, _, path = ("", "", ref) if is_uri(ref) else ref.partition(":")
    return reference_fields(pool, path)


def parse_location(text: str, field: str = "checkpoint") -> CheckpointLocation:
    """Parse POOL:PATH or the URI of an object store.

    Raises SpecError naming `field` and the nearest valid form.
    """
    return parse_uri(text, field) if is_uri(text) else parse_pool_path(text, field)


def is_uri(text: str) -> bool:
    """Return whether `text` has the form of a URI, valid or not: such a text is never a path."""
    return "://" in text


def parse_pool_path(text: str, field: str = "checkpoint", pool: str = "") -> CheckpointLocation:
    """Parse POOL:PATH, or PATH alone if a default `pool` is passed. Raises SpecError."""
    if is_uri(text):
        raise SpecError(
            field, f"{_redacted(text)} is not in a pool's storage", "write POOL:PATH, e.g. cpu:digits-3f9a2c"
        )
    pool_name, colon, path = text.partition(":")
    if not colon and pool:
        pool_name, path = pool, text
    elif not colon or not pool_name:
        raise SpecError(field, f"{_redacted(text)} does not name a pool", FORMS)
    if not POOL.fullmatch(pool_name):
        raise SpecError(field, f"{_redacted(pool_name)} is not a pool's name", FORMS)
    plain = "/".join(part for part in path.split("/") if part not in ("", "."))
    if path.startswith("/") or (refusal := path_error(plain)):
        reason = "it is absolute" if path.startswith("/") else refusal
        raise SpecError(
            field,
            f"path {_redacted(path)} is not inside the pool's storage: {reason}",
            f"write it relative to the storage, without `..`: {pool_name}:{_similar_path(path)}",
        )
    return CheckpointLocation(pool_name, plain)


def parse_uri(text: str, field: str = "checkpoint", more: tuple[str, ...] = ()) -> CheckpointLocation:
    """Parse SCHEME://BUCKET/PREFIX with one of SCHEMES or of `more`. Raises SpecError.

    The bucket is a name, not an address; credentials come from the environment of the process that uses the store.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        raise SpecError(field, f"{_redacted(text)} is not the URI of an object store", FORMS)
    if scheme not in (*SCHEMES, *more):
        close = [s for s in SCHEMES if s == scheme.lower()] or get_close_matches(scheme.rpartition("::")[2], SCHEMES, 1)
        remedy = nearest(close[0] if close else scheme[:20], SCHEMES)
        raise SpecError(field, f"{_redacted(text)} has the scheme {_redacted(scheme)}, not an object store's", remedy)
    plain = rest.rstrip("/")
    if refusal := _store_path_error(plain, scheme in SCHEMES):
        raise SpecError(
            field, f"{_redacted(text)} is not a plain location in a store: {refusal}", f"write {scheme}://BUCKET/PREFIX"
        )
    return CheckpointLocation("", plain, scheme)


def path_error(path: str) -> str:
    """Return why `path` is not a relative path, with `/`, below a folder; "" if it is.

    Length limits are Linux's.
    """
    parts = path.split("/")
    if not path:
        return "it is empty"
    if "\\" in path or any(unicodedata.category(char) in UNPRINTABLE for char in path):
        return "it contains a backslash or a control character"
    if any(part in ("", ".", "..") for part in parts):
        return "it has an empty part, `.` or `..`"
    sizes = [len(part.encode()) for part in parts]
    if sum(sizes) + len(sizes) > MAX_PATH_BYTES or max(sizes) > MAX_PART_BYTES or len(parts) > MAX_FOLDER_DEPTH:
        return "it is too long"
    return ""


def _store_path_error(path: str, is_named_store: bool) -> str:
    bucket = path.partition("/")[0]
    if "@" in bucket:
        return "a user name or password belongs in the environment"
    if "::" in path or "://" in path or any(char in WILDCARDS for char in path):
        return f"it contains `::`, `://` or one of {WILDCARDS}"
    if is_named_store and (not BUCKET.fullmatch(bucket) or ADDRESS.fullmatch(bucket)):
        return "BUCKET must be a name of letters, digits, `-`, `_` and `.`"
    return path_error(path)


def _similar_path(path: str) -> str:
    """Return a valid path close to `path`, for a remedy."""
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    cleaned = ("".join(c for c in part if unicodedata.category(c) not in UNPRINTABLE) for part in parts)
    candidate = "/".join(part for part in cleaned if part)
    return candidate if candidate and not path_error(candidate) else "digits-3f9a2c"


def _redacted(text: str) -> str:
    """Quote `text` for an error, without the parts before an `@` and behind a `?`, which may be secrets."""
    scheme, separator, rest = text.rpartition("://")
    _, at, host = rest.rpartition("@")
    location, mark, _ = (host if at and separator else rest).partition("?")
    redacted = f"{scheme}{separator}{'…@' if at and separator else ''}{location}{'?…' if mark else ''}"
    return repr(redacted if len(redacted) <= 200 else f"{redacted[:200]}…")
