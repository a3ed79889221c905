"""Kernels as torch operators: measured against torch's own, stored, and chosen for each call."""
