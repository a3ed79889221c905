"""Blocks of code and of commands in the README and the guides.

A comment before a block, `<!-- not run: why -->`, has it parsed only.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "README.md", *sorted((ROOT / "docs").glob("[bg]*s/*.md"))]
BLOCK = re.compile(
    r"^(?P<mark><!-- not run: .+ -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    run: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        yield Block(page, line, match["language"], match["text"], match["mark"] is None)


def of(language: str, page: Path | None = None) -> list[Block]:
    return [b for p in PAGES for b in blocks(p) if b.language == language and page in (None, p)]


def commands(block: Block) -> list[str]:
    """The lines after a prompt; others would be output."""
    return [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
