"""Forms in which programs usually print a secret: quoted, escaped or encoded."""

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from urllib.parse import quote, quote_plus

MIN_LINE_LENGTH = 8
SHELL = re.compile(r"[^\w@%+=:,./-]", re.ASCII)
ESCAPED = ("<>&", "<>&'", "<>&'+`\"")
"""Characters that JSON encoders escape because of HTML: those of Go; of PHP and Jackson; of .NET."""
WRAPPED_AT = (64, 76)
"""Line lengths of base64 by openssl and by coreutils."""


def encoded_forms(secret: str) -> set[bytes]:
    """All forms of a secret, itself included.

    If it has several lines, each longer line counts as a secret, too.
    """
    lines = secret.splitlines()
    long_lines = [line for line in lines if len(line) >= MIN_LINE_LENGTH] if len(lines) > 1 else []
    texts = (secret, secret.strip(), *long_lines)
    return {form for text in texts for form in (*_texts(text), *_encoded(text.encode("utf-8", "surrogatepass")))}


def _texts(secret: str) -> Iterator[bytes]:
    for text in {secret, *_urls(secret), *_json(secret), *_python(secret), *_shell(secret), *_markup(secret)}:
        yield text.encode("utf-8", "surrogatepass")
        if "\n" in text:
            yield text.replace("\r\n", "\n").replace("\n", "\r\n").encode("utf-8", "surrogatepass")
    yield from (secret.encode(name, "surrogatepass") for name in ("utf-16-le", "utf-16-be"))
    if not secret.isascii() and max(secret) <= "\xff":
        yield secret.encode("latin-1")


def _urls(secret: str) -> Iterator[str]:
    """Percent-encoded forms, as by Python and JavaScript, and of all characters; hex in both cases."""
    data = secret.encode("utf-8", "surrogatepass")
    all_encoded = "".join(f"%{byte:02X}" for byte in data)
    safe_sets = ("", "/", "!'()*~", ";,/?:@&=+$!'()*~#")
    for text in (quote_plus(data), all_encoded, *(quote(data, safe=safe) for safe in safe_sets)):
        yield text
        yield re.sub("%..", lambda match: match[0].lower(), text)


def _json(secret: str) -> Iterator[str]:
    """JSON forms: also with `/`, HTML's characters or all characters escaped, and as JSON within JSON."""
    units = secret.encode("utf-16-be", "surrogatepass")
    yield from _both_cases("".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2)))
    for ascii_only in (True, False):
        text = json.dumps(secret, ensure_ascii=ascii_only)[1:-1]
        for escaped in (text, text.replace("/", "\\/"), *(_escaped(text, characters) for characters in ESCAPED)):
            yield from _both_cases(escaped)
            yield json.dumps(escaped, ensure_ascii=ascii_only)[1:-1]


def _escaped(text: str, characters: str) -> str:
    plain = text.replace('\\"', '"') if '"' in characters else text
    return re.sub(f"[{characters}]", lambda match: f"\\u{ord(match[0]):04x}", plain)


def _both_cases(text: str) -> tuple[str, str]:
    return text, re.sub(r"(?<=\\u)[0-9a-f]{4}", lambda match: match[0].upper(), text)


def _python(secret: str) -> Iterator[str]:
    """Forms by Python's repr, ascii and repr of bytes, inside quotes of either kind."""
    data = secret.encode("utf-8", "surrogatepass")
    for text in (repr("'\"" + secret)[4:-1], ascii("'\"" + secret)[4:-1], repr(b"'\"" + data)[5:-1]):
        yield text
        yield text.replace("\\'", "'")
    yield "".join(f"\\x{byte:02x}" for byte in data)


def _shell(secret: str) -> Iterator[str]:
    yield secret.replace("'", "'\"'\"'")
    yield secret.replace("'", "'\\''")
    yield SHELL.sub(lambda match: "\\" + match[0], secret)


def _markup(secret: str) -> Iterator[str]:
    text = secret.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    yield text
    for double, single in (("&quot;", "&#x27;"), ("&#34;", "&#39;"), ("&quot;", "&apos;")):
        yield text.replace('"', double).replace("'", single)


def _encoded(data: bytes) -> Iterator[bytes]:
    """Hexadecimal and base64 forms, in both alphabets, also as a part of longer data.

    There the position decides how the bits of the secret are spread over characters; characters at its ends that share
    bits with the data around it are left out.
    """
    yield data.hex().encode()
    yield data.hex().upper().encode()
    for shift in range(3):
        text = b64encode(bytes(shift) + data)
        inside = text[(8 * shift + 5) // 6 : 8 * (shift + len(data)) // 6]
        yield from (inside, inside.translate(bytes.maketrans(b"+/", b"-_")))
    encoded = b64encode(data)
    for width in WRAPPED_AT:
        rows = [encoded[i : i + width] for i in range(0, len(encoded), width)]
        yield from (row for row in rows if len(rows) > 1 and len(row) >= MIN_LINE_LENGTH)
