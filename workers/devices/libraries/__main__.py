"""`python -m workers.devices.libraries [--json]`: all libraries, whether each is available, and how to switch it.

`python -m workers.devices.libraries --observe NAME` runs a library's workload in this process and prints the outcome.
"""

import json
import os
import sys
from typing import Any

from workers.devices.libraries.availability import build_flags
from workers.devices.libraries.library import Library
from workers.devices.libraries.registry import LIBRARIES, get_library


def rows() -> list[dict[str, Any]]:
    """Return one dict per library.

    Keys: name, display_name, requires_gpu, devices, required_libraries, available, reason, version, flags, enabled
    (None without a switch), switch (`in process`, `fresh process`, `launcher` or ``), provable.
    """
    return [_row(library) for library in LIBRARIES.values()]


def _row(library: Library) -> dict[str, Any]:
    reason = library.unavailable_reason()
    return {
        "name": library.name,
        "display_name": library.display_name,
        "requires_gpu": library.requires_gpu,
        "devices": list(library.devices),
        "required_libraries": list(library.required_libraries),
        "available": not reason,
        "reason": reason,
        "version": "" if reason else library.version(),
        "flags": build_flags(library.settings),
        "enabled": library.switch.read() if library.switch is not None and not reason else None,
        "switch": switch_method(library),
        "provable": library.observe is not None and not reason,
    }


def switch_method(library: Library) -> str:
    if library.switch is not None:
        return "in process"
    return "launcher" if library.launcher else "fresh process" if library.fresh.get(False) else ""


def observe(name: str) -> None:
    run = get_library(name).observe
    assert run is not None
    is_on, evidence = run()
    sys.stdout.write("\n" + json.dumps({"seen": is_on, "evidence": evidence}) + "\n")


def main() -> None:
    if "--observe" in sys.argv:
        observe(sys.argv[sys.argv.index("--observe") + 1])
        return
    listed = rows()
    if "--json" in sys.argv:
        os.write(1, json.dumps(listed).encode())
        return
    for row in listed:
        mark = "yes" if row["available"] else "no"
        details = row["reason"] or " ".join(filter(None, (row["version"], row["switch"] and f"({row['switch']})")))
        sys.stdout.write(f"{mark:4}{row['name']:12}{row['display_name']:36}{details}\n")


if __name__ == "__main__":
    main()
