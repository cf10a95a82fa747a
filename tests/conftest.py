"""What holds for all tests: variables that have to be set before torch and Triton are imported, and no deadlines."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from quire.cost import devices

# Torch's threads wait for each other by spinning: with several, on a machine that does other things too, the many small
# operations of these tests take ten times as long. The engine sets its own number, and the kernels have their own pool.
os.environ["OMP_NUM_THREADS"] = "1"
# Without a GPU, Triton kernels are interpreted.
if not devices.has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

# The machine that runs the tests may be busy.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
