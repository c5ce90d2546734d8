"""Fused kernels for the operations of kernels.py, for NVIDIA GPUs in bf16 and fp8.

forms         which kernel computes an operation, and for which calls
texts         which text of each definition in kernels.py they compute; prints the digests
chunks, gradients    a loss in chunks of tokens, backwards by hand; plain PyTorch, for every device
chips         which of them a GPU can run, its backend for attention
linear, norm, rope, mlp, loss   the operations: launcher and constants beside the kernel
fp8           linear layers, MLP and loss in 8-bit floats
cublas        GEMMs by cuBLASLt, with epilogues
hopper        GEMMs for Hopper GPUs in CUDA: hopper_gemm.cu, hopper_wgrad.cu, hopper.cuh
operators     registers kernels as PyTorch operators, for torch.compile
fusion        a pass over compiled graphs that moves work into a norm's kernels

Files with kernels need Triton; they are imported where a GPU runs them (forms.load). This folder
imports neither kernels nor model, so that it cannot say what a model computes.
"""

# most memory for logits that a loss holds at a time: fused in bf16, plain in float32
LOGITS_MIB = 1024
