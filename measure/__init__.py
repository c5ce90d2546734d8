"""What bench.py calls, a file a command; lm-evaluation-harness's front, its model and two tasks, *.yaml."""
