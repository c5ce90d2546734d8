"""Several GPUs, long sequences and memory: what goes around a model, without a change of what it computes.

parallel      processes and devices; the model compiled, sharded and wrapped (DDP, FSDP2); collectives
shards        the rows of a sharded tensor that a rank holds
context       context parallelism: the tokens of a sequence over several ranks
documents     document masks: tokens attend within their document
remat         activation checkpointing by block, attention or MLP
offload       kept activations in the host's memory
memory        the estimate of GPU memory; imports no torch
plan          the estimate of speed, and the search for settings that fit; imports no torch

optim.py, train.py, the wings run and measure, and the scripts import this wing. It imports settings, kernels, model and
the wings fast and corpus (tokenizers).
"""
