"""What has to be in the environment before anything imports torch or Triton."""

from __future__ import annotations

import os

from quire.cost import devices

# Torch's threads wait for each other by spinning: with several, on a machine that does other things too, the many small
# operations of these tests take ten times as long. The engine sets its own number, and the kernels have their own pool.
os.environ["OMP_NUM_THREADS"] = "1"
# Without a GPU, Triton kernels are interpreted.
if not devices.has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"
