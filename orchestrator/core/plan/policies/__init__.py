"""Scheduling policies: the order of submission, and functions that value each option of each job."""
