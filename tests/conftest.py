"""Without a GPU, Triton kernels are interpreted: the variable for that has to be set before anything imports it."""

from __future__ import annotations

import os

from quire.cost import devices

if not devices.has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"
