"""`python -m workers.devices.selection [--json]`: print the summary, for processes that must not import torch."""

import json
import os
import sys

from cluster.errors import PolyfleetError
from workers.devices.selection.summary import backend_rows, disable_torch_autoload, print_backend_summary


def main() -> int:
    disable_torch_autoload()
    try:
        if "--json" in sys.argv:
            os.write(1, json.dumps(backend_rows()).encode())
        else:
            print_backend_summary()
    except PolyfleetError as e:
        print(f"error: {e}", file=sys.stderr)  # noqa: T201
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
