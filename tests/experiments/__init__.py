"""Small patches as users write them, and what must come out: see test_experiments.py."""
