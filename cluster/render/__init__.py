"""Files for engines that start nodes elsewhere, from the pools of a fleet file: a RayCluster for KubeRay, a YAML for
Ray's cluster launcher, a batch script for Slurm. Text in, text out: nothing here talks to a cluster or imports Ray.
"""
