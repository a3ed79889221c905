"""A clock for code whose time is data."""


class PassingTime:
    """Passes while somebody sleeps."""

    def __init__(self):
        self.now_s = 100.0

    def now(self):
        return self.now_s

    def sleep(self, wait_s):
        self.now_s += wait_s
