"""Entry point of `python -m workers.attempt FOLDER LOCK`, which supervises an attempt: supervision/supervisor.py."""

import gc
import sys

gc.disable()  # imports leave no garbage: not looking for it saves 3 of 40 ms at every start of an attempt

from workers.attempt.supervision.supervisor import main  # noqa: E402 - see above

gc.freeze()
gc.enable()
sys.exit(main())
