"""Prepare a model at a level from O0 to O3: which passes run, and what each gains."""
