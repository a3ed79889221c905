"""Comparing back ends: what the benchmark jobs of several pools measured, joined."""
