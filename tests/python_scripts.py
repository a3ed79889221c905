"""The first lines of a Python program that is started by its name, as a vendor's tool is."""

import shlex
import sys

SHEBANG = f"""#!/bin/sh
'''exec' {shlex.quote(sys.executable)} "$0" "$@"
' '''
"""
"""The kernel splits a `#!` line at a blank, which a path may contain. To Python, lines 2 and 3 are a text."""
