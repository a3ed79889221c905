"""The console script `polyfleet`, and `python -m orchestrator.cli`.

Imports leave no garbage, and collections would take a sixth of the CPU time of `polyfleet --version`.
"""

import gc

gc.disable()

from orchestrator.cli.main import main  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    main()
