"""Check which symbolic links of a submitted folder may be created.

The check uses only the names in the archive, never the disk. A link's target is followed part by part. Each part but
the last must be a folder of the archive, never a link, so that the kernel resolves the target as this code does; the
last part is a file, a folder, or a link to which the same applies.
"""

from collections.abc import Iterable, Iterator, Mapping

MAX_TARGET_BYTES = 1024
MAX_HOPS = 32
"""Maximum chain of links. Linux follows 40 in a path; some may be above the folder. Source: path_resolution(7)."""


class ArchiveTree:
    """Entries of an archive. `names` of folders end with a slash; `links` maps names to targets."""

    def __init__(self, names: Iterable[str], links: Mapping[str, str]):
        self._links = links
        self._files: set[str] = set()
        self._folders = {""}
        for name in names:
            if name.endswith("/"):
                self._folders.add(name[:-1])
            elif name not in links:
                self._files.add(name)
            self._folders.update(folders_above(name.removesuffix("/")))
        for name in links:
            self._folders.update(folders_above(name))

    def link_error(self, link: str) -> str:
        """Return why the link of this name must not be created, to be put after "a link"; "" if it may be."""
        entry = link
        for _ in range(MAX_HOPS):
            entry, reason = self._follow(entry)
            if reason or entry not in self._links:
                return reason
        return f"that is part of a loop or of a chain of more than {MAX_HOPS} links"

    def leads_to_folder(self, link: str) -> bool:
        """Return whether a link that may be created leads to a folder."""
        while link in self._links:
            link, _ = self._follow(link)
        return link in self._folders

    def _follow(self, link: str) -> tuple[str, str]:
        """Follow `link` once: (the entry that its target names, or why it names none)."""
        target, current = self._links[link], link.rpartition("/")[0]
        if not target or target.startswith("/"):
            return "", "whose target is empty or an absolute path"
        if link in self._folders:
            return "", "that also has entries below it"
        for part in target.split("/"):
            if current not in self._folders or current in self._links:
                return "", "whose target passes through something that is not a folder of the archive"
            if part == ".." and not current:
                return "", "that points outside the folder"
            if part == "..":
                current = current.rpartition("/")[0]
            elif part not in ("", "."):
                current = f"{current}/{part}" if current else part
        if current in self._files or current in self._folders or current in self._links:
            return current, ""
        return "", "to nothing in the archive"


def folders_above(name: str) -> Iterator[str]:
    """Yield the folders that contain `name`, nearest first, without the outermost."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name
