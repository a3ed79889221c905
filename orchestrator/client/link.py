"""How the requests and responses of verbs travel: a method for each exchange. The classes in `verbs/` call them.

`path` is a verb's, such as `/v1/jobs/{ref}`. `arguments` are those of the path and of the query; a mapping is sent as
JSON. None means absent, there and in `body`. `is_slow`: the response may take minutes, so nothing limits its time.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4

from cluster.errors import NotFound
from orchestrator.client.server_connection import Bytes, Data, ServerConnection
from orchestrator.client.transport import NO_TIMEOUT, ServerUnreachable, non_empty, segment

T = TypeVar("T")
Rows = list[T]
"""A list, under a name that a method called `list` does not hide."""
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A binary response. Names of headers match in any case."""

    content: bytes
    headers: Mapping[str, str]


class Link(ServerConnection):
    """Connection over which verbs travel."""

    def plain(
        self, method: str, path: str, arguments: Data, body: Data | None = None, *, key: str = "", is_slow: bool = False
    ) -> Any:
        """JSON in both directions. With a `key`, the request is repeated until a response arrives, and counts once."""
        url, options = _request(path, arguments, is_slow)
        if method == "POST":
            content = non_empty(**body or {})
            return self.post_once(url, content, key, **options) if key else self.post(url, content, **options)
        return self.call(method, url, headers={} if method == "GET" else JSON, **options)

    def once(self, method: str, path: str, arguments: Data, body: Data, *, key: str) -> Any:
        """Like `plain`, with a key of its own if `key` is ""."""
        return self.plain(method, path, arguments, body, key=key or uuid4().hex)

    def exists(self, path: str, arguments: Data) -> bool:
        """Whether the response to HEAD is not 404."""
        url, options = _request(path, arguments)
        try:
            self.call("HEAD", url, **options)
        except NotFound:
            return False
        return True

    def pages(self, path: str, arguments: Data) -> Iterator[Rows[Any]]:
        """All pages of a list, as their `Link` headers name them."""
        url, options = _request(path, arguments)
        while url:
            response = self.send_request("GET", url, **options)
            yield response.json()
            url, options = response.links.get("next", {}).get("url", ""), {}

    def stream(self, method: str, path: str, arguments: Data, body: Data | None = None) -> Iterator[tuple[str, Any]]:
        """Names and data of events, until the server ends the stream. Closing this iterator ends it, too."""
        url, options = _request(path, arguments)
        yield from self.events(method, url, **options, **({} if body is None else {"json": non_empty(**body)}))

    def follow(self, path: str, arguments: Data, resume: Mapping[str, str]) -> Iterator[Any]:
        """Data of all events but `end`, after which the stream has ended. If it breaks off, the next server continues
        it: each argument in `resume` is then the named value of the last event, or absent if that is "". Raises
        ServerUnreachable if no server does.
        """
        while True:
            try:
                for name, data in self.stream("GET", path, arguments):
                    if name == "end":
                        return
                    arguments = arguments | {key: data[value] if value else None for key, value in resume.items()}
                    yield data
                error = ServerUnreachable("the server has stopped", "repeat the call: it starts a server")
            except ServerUnreachable as e:
                error = e
            self.reconnect(error)

    def operation(self, path: str, arguments: Data, body: Data, progress: Bytes | None, key: str) -> Any:
        """A long operation: it returns its result. If the connection breaks, it is repeated with the same key."""
        url, options = _request(path, arguments)
        return self.run_operation(url, non_empty(**body), progress, key or uuid4().hex, **options)

    def upload(self, method: str, path: str, arguments: Data, content: bytes | BinaryIO, content_type: str) -> Any:
        url, options = _request(path, arguments, is_slow=True)
        return self.call(method, url, content=content, headers={"Content-Type": content_type}, **options)

    def download(self, path: str, arguments: Data) -> Downloaded:
        url, options = _request(path, arguments, is_slow=True)
        response = self.send_request("GET", url, **options)
        return Downloaded(response.content, response.headers)


def _request(path: str, arguments: Data, is_slow: bool = False) -> tuple[str, Data]:
    """The path with its arguments, and the options of the request. Raises NotFound for an invalid name."""
    in_path = re.findall(r"{(\w+)}", path)
    url = path.format(**{name: segment(str(arguments[name])) for name in in_path})
    query = {name: _query_value(value) for name, value in non_empty(**arguments).items() if name not in in_path}
    return url, {"params": query} | ({"timeout": NO_TIMEOUT} if is_slow else {})


def _query_value(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, Mapping) else value
