"""Fast forms of the operations of kernels.py for NVIDIA GPUs in bf16 and fp8; the tests compare each with float64.

chips         which of them a GPU can run, by its compute capability; a CPU whose AMX cannot be used
attention     the backend of scaled_dot_product_attention by device, and the layout that cuDNN's backward needs
linear        x W^T + b, and the projection to q, k and v
norm          LayerNorm and RMSNorm, with the residual addition before them
rope          RoPE of queries and keys, with the RMSNorm of their heads before it
mlp           the MLP, its activation in the GEMMs' epilogues
loss          the head and cross-entropy, in chunks of tokens
fp8           linear layers, MLP and loss in 8-bit floats
adam8         the 8-bit format of AdamW's moments; adam8_triton: its update in one kernel per tensor
cublas        GEMMs by cuBLASLt, with epilogues
hopper        GEMMs for Hopper GPUs in CUDA: hopper_gemm.cu, hopper_wgrad.cu, hopper.cuh
operators     registers kernels as PyTorch operators, for torch.compile
fusion        a pass over compiled graphs that moves work into a norm's backward kernel

kernels.py imports this wing, and so do model.build and the wings scale, run and measure. It imports neither kernels nor
model, so that it cannot say what a model computes.
"""
