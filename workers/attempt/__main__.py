"""`python -m workers.attempt FOLDER LOCK` supervises an attempt; see supervisor.py."""

import gc
import sys

gc.disable()  # imports leave no garbage: without looking for it 3 of 40 ms are saved at every start of an attempt

from workers.attempt.supervisor import main  # noqa: E402 - see above

gc.freeze()
gc.enable()
sys.exit(main())
