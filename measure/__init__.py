"""What bench.py calls; only it, scripts in results/ and the tests import this package.

step: a training step by kind of kernel; floor: its GEMMs and attention alone; ops: single operations; comm:
collectives; tables: the memory estimate. hellaswag_local.yaml is a task for lm-evaluation-harness.
"""
