"""What bench.py calls: times of training steps, operations and collectives; memory and speed by arithmetic.

step          a training step, as train.py runs it, by kind of kernel
floor         the lower bound of a step: its GEMMs and attention alone
ladder        training steps from float32 to fp8, one change at a time
peers         the same step in transformers, plain and with Liger's kernels
ops           single operations: the forms of fast/ beside torch.compile's
comm          the bus bandwidth of collectives
support       which fast forms run on a GPU
tables        the tables of scale/memory.py and scale/plan.py, and the planned recipe; imports no torch
rates         rates for the plan: from data sheets, or from figures that step and comm wrote; imports no torch

hellaswag_local.yaml is a task for lm-evaluation-harness, see docs/checkpoints.md.

Only bench.py and the tests import this wing. It may import everything, train.py included.
"""
