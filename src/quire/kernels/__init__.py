"""Kernels: typed ops (ops, dense, grouped, fp8), twins in plain torch (reference), for CPU (cpu), GPU (triton)."""
