"""What exists: vocabulary, accelerator facts, pools, environments, and the cluster that holds them.

Imports neither sister package.
"""
