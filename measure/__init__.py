"""What bench.py calls, a file a command, and a task for lm-evaluation-harness, hellaswag_local.yaml."""
