"""fsspec's object store in memory, which only tests may name: memory://bucket/…"""

from contextlib import contextmanager

import fsspec

from workers.checkpoint.transfer import stores


@contextmanager
def memory_store(monkeypatch):
    """Yields its file system, empty. It is of this process: a tool that uses it cannot run in a child."""
    monkeypatch.setattr(stores, "IN_MEMORY", ("memory",))
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()
