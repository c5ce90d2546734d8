"""What bench.py calls, a file a command; floor: a step's GEMMs and attention alone.

hellaswag_local.yaml is a task for lm-evaluation-harness.
"""
