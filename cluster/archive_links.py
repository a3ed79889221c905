"""Which links of a submitted folder may be made: an answer from the names in the archive alone, never from a disk.

What a link says is read part by part. Each part on the way is a folder of the archive, never a link, so that the text
means to the kernel what it means here; the last one is a file, a folder, or a link of which the same holds.
"""

from collections.abc import Iterable, Iterator, Mapping

MAX_TEXT_BYTES = 1024
MAX_HOPS = 32
"""Links one to another. Linux follows 40 in a path, and some may lie above the folder. Source: path_resolution(7)."""


class Tree:
    """`names` of all entries, with a slash behind those of folders; `links`: what each link says, by its name."""

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

    def refusal(self, link: str) -> str:
        """Why the link of this name must not be made, as words behind "a link"; "" when it may."""
        name = link
        for _ in range(MAX_HOPS):
            name, reason = self._followed(name)
            if reason or name not in self._links:
                return reason
        return f"in a circle, or to more than {MAX_HOPS} links, one to another"

    def leads_to_folder(self, link: str) -> bool:
        """Of a link that may be made."""
        while link in self._links:
            link, _ = self._followed(link)
        return link in self._folders

    def _followed(self, link: str) -> tuple[str, str]:
        """(the entry that the text of `link` leads to, why it leads to none)."""
        text, here = self._links[link], link.rpartition("/")[0]
        if not text or text.startswith("/"):
            return "", "that is empty or an absolute path"
        if link in self._folders:
            return "", "below which other entries lie"
        for part in text.split("/"):
            if here not in self._folders or here in self._links:
                return "", "whose way leads through what is no folder of the archive"
            if part == ".." and not here:
                return "", "that leads out of the folder"
            if part == "..":
                here = here.rpartition("/")[0]
            elif part not in ("", "."):
                here = f"{here}/{part}" if here else part
        if here in self._files or here in self._folders or here in self._links:
            return here, ""
        return "", "to nothing in the archive"


def folders_above(name: str) -> Iterator[str]:
    """The folders that `name` lies in, nearest first, without the outermost."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name
