"""What bench.py calls, a file a command, and lm-evaluation-harness: harness.py, two tasks, hellaswag_*.yaml."""
