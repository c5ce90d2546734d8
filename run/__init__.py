"""What a run needs around its loop, and what the scripts need of a run's results."""
