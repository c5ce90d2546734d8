"""What bench.py calls, a file a command, and two tasks for lm-evaluation-harness, hellaswag_*.yaml."""
