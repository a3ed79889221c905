"""A vendor that Polyfleet has never heard of: its devices compute on the CPU and are as many as
TOY_DEVICES says.
"""
