"""Decides what each step computes: request queue, KV block management and the scheduler. Integers only, no torch."""
