"""Machines that a fleet reaches over SSH: looked at, given our code and their environment, joined, left again."""
