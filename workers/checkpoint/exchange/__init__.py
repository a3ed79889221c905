"""Work with other programs: import and export, torch's distributed checkpoint, and the checkpoints that scripts write.

Imported files and scripts' checkpoints are untrusted. Nothing in them is executed; they are read by processes with
limits (cluster/input/sandbox.py). Exports follow each format's rules.
"""
