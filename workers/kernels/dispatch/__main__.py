"""List or measure kernels.

`python -m workers.kernels.dispatch [--json]` lists every implementation, and whether it is usable here.
`python -m workers.kernels.dispatch tune '{"operations": …}'` measures, and writes a line of JSON for each measurement.
"""

import json
import os
import sys
from typing import Any

from cluster.errors import PolyfleetError
from workers import kernels as registry


def main(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["tune"]:
            _tune(json.loads(arguments[1]))
        else:
            _list("--json" in arguments)
    except PolyfleetError as e:
        print(f"error: {e}", file=sys.stderr)  # noqa: T201
        return e.exit_code
    return 0


def _list(as_json: bool) -> None:
    from workers.kernels.dispatch.kernel_choice import get_kernels_info

    rows = [get_kernels_info(name) for name in registry.names()]
    if as_json:
        os.write(1, json.dumps(rows).encode())
        return
    for row in rows:
        status = row["reason"] or f"{row['device_name']}{', interpreted' if row['interpreted'] else ''}"
        sys.stdout.write(f"{'yes' if row['available'] else 'no':4}{row['name']:12}{status}\n")


def _tune(request: dict[str, Any]) -> None:
    """Measure as in `request`: operations, kernels, dtypes (lists of names, may be empty), device, compiled."""
    from workers.devices.backends.precision import dtype_of
    from workers.kernels.dispatch import comparison

    dtypes = [dtype_of(name) for name in request["dtypes"]]
    comparison.tune(
        request["operations"], request["kernels"], request["device"], dtypes, request["compiled"],
        on_result=lambda one: _write(one.to_plain()),
    )  # fmt: skip


def _write(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
