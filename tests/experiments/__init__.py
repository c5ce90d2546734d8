"""Small patches of the sources, as a user writes them, and what must come out:
see test_experiments.py.
"""
