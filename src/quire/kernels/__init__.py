"""Kernels: typed ops (ops, dense, grouped, fp8), their twins in plain torch (reference), CPU (cpu), GPU (triton)."""
