"""What bench.py and plot.py call, and two tasks for lm-evaluation-harness, hellaswag_*.yaml."""
