"""The GPU kernels in Triton. Each has the contract of the function with its name in `kernels.ops`, for CUDA tensors."""
