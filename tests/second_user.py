"""Another user of this machine."""

import json
import os
from collections.abc import Callable
from typing import Any

NOBODY = 65534


class SecondUser:
    """Another user of this machine, without rights of ours."""

    uid = NOBODY

    def does(self, act: Callable[[], Any]) -> Any:
        """What `act` returns, as JSON has it, when that user calls it; or the name of the error it raises."""
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                said = act()
            except BaseException as e:
                said = type(e).__name__
            os.write(writing, json.dumps(said).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as f:
            said = f.read()
        os.waitpid(child, 0)
        return json.loads(said)
