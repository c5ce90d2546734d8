"""Several GPUs, long sequences and memory: what goes around a model and keeps its results."""
