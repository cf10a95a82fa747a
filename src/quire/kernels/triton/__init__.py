"""The GPU kernels, in Triton: each has the contract of its namesake in `kernels.ops`, for CUDA tensors."""
