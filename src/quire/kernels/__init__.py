"""Kernels: typed ops with shape contracts (ops), their plain-torch twins (reference), the compiled CPU path (cpu)."""
