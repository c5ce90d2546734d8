"""What bench.py and plot.py call; lm-evaluation-harness's front,
its model and two tasks, *.yaml.
"""
