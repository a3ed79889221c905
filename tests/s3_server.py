"""An object store that speaks S3 over HTTP, for tests alone: moto's server, with buckets in its memory."""

import os
import re
import subprocess
import sys
import uuid
from importlib.util import find_spec

PACKAGES = ("s3fs", "moto", "flask_cors")


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if find_spec(name) is None]


class S3Server:
    """A server on a free port of 127.0.0.1. `variables` are those with which the libraries of S3 find it."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        self._process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
        assert self._process.stderr is not None
        match = next(m for line in self._process.stderr if (m := re.search(r"http://127\.0\.0\.1:\d+", line)))
        self.variables = {
            "AWS_ENDPOINT_URL": match[0],
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def make_bucket(self) -> str:
        """Make an empty bucket, and return its name."""
        name = f"b-{uuid.uuid4().hex}"
        self.files().mkdir(name)
        return name

    def files(self):
        """What fsspec offers to read and change objects here, in the way that a program beside ours would."""
        import s3fs

        keys = {"key": self.variables["AWS_ACCESS_KEY_ID"], "secret": self.variables["AWS_SECRET_ACCESS_KEY"]}
        return s3fs.S3FileSystem(
            **keys,
            endpoint_url=self.variables["AWS_ENDPOINT_URL"],
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()
