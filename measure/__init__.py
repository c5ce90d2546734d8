"""What bench.py calls, plot.py's table of seeds, and two tasks for lm-evaluation-harness, hellaswag_*.yaml."""
