"""Several GPUs, long sequences and memory:
what goes around a model without a change of what it computes.
"""
