"""Other machines' trees, unpacked at the edge of discovery. See tests/data/README.md: they are reconstructions."""

import json
from pathlib import Path

import pytest
import yaml

from workers.devices.discovery.machine import Machine

DATA = Path(__file__).parents[3] / "data" / "discovery"


@pytest.fixture
def machine(tmp_path):
    """machine("amd-mi300x", VARIABLE="…") is that machine."""

    def build(name, **environ):
        root = tmp_path / name
        for path, text in yaml.safe_load((DATA / f"{name}.yaml").read_text()).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("-> "):
                (root / path).symlink_to(text.removeprefix("-> "))
            else:
                (root / path).write_text(text)
        return Machine(root, environ, "Linux")

    return build


@pytest.fixture
def said():
    """said("apple-m4-pro") is what that machine's tool says."""
    return lambda name: json.loads((DATA / f"{name}.json").read_text())
