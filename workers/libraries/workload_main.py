"""`python -m workers.libraries.workload_main NAME` runs a library's workload as this process is, and prints what
was seen.
"""

import json
import sys

from workers.libraries.registry import get_library


def main(name: str) -> None:
    look = get_library(name).seen
    assert look is not None
    seen, evidence = look()
    sys.stdout.write("\n" + json.dumps({"seen": seen, "evidence": evidence}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
