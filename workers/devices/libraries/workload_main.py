"""`python -m workers.devices.libraries.workload_main NAME`: run a library's workload here and print the outcome."""

import json
import sys

from workers.devices.libraries.registry import get_library


def main(name: str) -> None:
    observe = get_library(name).observe
    assert observe is not None
    is_on, evidence = observe()
    sys.stdout.write("\n" + json.dumps({"seen": is_on, "evidence": evidence}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
