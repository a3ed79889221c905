"""The command `polyfleet`. Imports neither ray nor torch; what a command needs is imported when it runs.

stdout carries the answer alone, in the format asked for with `-o`; messages and progress go to stderr.
"""
