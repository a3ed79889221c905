"""Configurations of Triton kernels, compiled without a device, and the resources that each needs."""
