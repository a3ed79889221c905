"""The command `polyfleet`. Imports neither ray nor torch; a command's imports happen when it runs.

stdout contains only the result, in the format that `-o` selects; messages and progress go to stderr.
"""
