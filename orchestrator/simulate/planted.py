PLANTED = ("x",)
from contextlib import contextmanager
@contextmanager
def planted(n): yield
