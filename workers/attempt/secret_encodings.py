"""The forms that programs usually print a secret in: quoted, escaped and encoded by what lies between it and a log."""

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from urllib.parse import quote, quote_plus

SHORTEST_LINE = 8
SHELL = re.compile(r"[^\w@%+=:,./-]", re.ASCII)
ESCAPED = ("<>&", "<>&'", "<>&'+`\"")
"""By JSON that may stand in HTML: of Go, of PHP and Jackson, of .NET."""
WRAPPED_AT = (64, 76)
"""Columns of openssl's and coreutils' base64."""


def encoded_forms(secret: str) -> set[bytes]:
    """The secret itself among them; of one with several lines, each longer line is a secret too."""
    lines = secret.splitlines()
    more = [line for line in lines if len(line) >= SHORTEST_LINE] if len(lines) > 1 else []
    texts = (secret, secret.strip(), *more)
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
    """Percent-encoded: of Python, of JavaScript's two functions, and of everything; hexadecimal in both cases."""
    data = secret.encode("utf-8", "surrogatepass")
    each = "".join(f"%{byte:02X}" for byte in data)
    kept = ("", "/", "!'()*~", ";,/?:@&=+$!'()*~#")
    for text in (quote_plus(data), each, *(quote(data, safe=safe) for safe in kept)):
        yield text
        yield re.sub("%..", lambda match: match[0].lower(), text)


def _json(secret: str) -> Iterator[str]:
    """Also with `/` and what HTML reads escaped, with every character escaped, and as JSON inside of JSON."""
    units = secret.encode("utf-16-be", "surrogatepass")
    yield from _both_cases("".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2)))
    for ascii_only in (True, False):
        text = json.dumps(secret, ensure_ascii=ascii_only)[1:-1]
        for one in (text, text.replace("/", "\\/"), *(_escaped(text, some) for some in ESCAPED)):
            yield from _both_cases(one)
            yield json.dumps(one, ensure_ascii=ascii_only)[1:-1]


def _escaped(text: str, characters: str) -> str:
    plain = text.replace('\\"', '"') if '"' in characters else text
    return re.sub(f"[{characters}]", lambda match: f"\\u{ord(match[0]):04x}", plain)


def _both_cases(text: str) -> tuple[str, str]:
    return text, re.sub(r"(?<=\\u)[0-9a-f]{4}", lambda match: match[0].upper(), text)


def _python(secret: str) -> Iterator[str]:
    """repr, ascii and repr of bytes, inside quotes of either kind."""
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
    """Hexadecimal; base64 in both alphabets, as a part of something longer too: what surrounds it decides how its bits
    fall into characters, and those at the ends hold bits of its neighbours."""
    yield data.hex().encode()
    yield data.hex().upper().encode()
    for shift in range(3):
        text = b64encode(bytes(shift) + data)
        inside = text[(8 * shift + 5) // 6 : 8 * (shift + len(data)) // 6]
        yield from (inside, inside.translate(bytes.maketrans(b"+/", b"-_")))
    whole = b64encode(data)
    for columns in WRAPPED_AT:
        rows = [whole[i : i + columns] for i in range(0, len(whole), columns)]
        yield from (row for row in rows if len(rows) > 1 and len(row) >= SHORTEST_LINE)
