"""What bench.py and plot.py call, and lm-evaluation-harness's front, model and tasks (*.yaml)."""
