"""Render the pools of a fleet file for other engines that start nodes: KubeRay, Ray's launcher, Slurm.

The result is a RayCluster, a launcher's YAML or a batch script. Text in, text out: nothing here connects to a cluster
or imports Ray.
"""
