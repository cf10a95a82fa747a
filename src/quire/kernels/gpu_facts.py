"""Finds the GPU that an engine would use if it started now. `python -m quire.kernels.gpu_facts` prints it as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec

import torch

from quire.planning import devices
from quire.resolve import NO_DRIVER, GpuFacts


def detect() -> GpuFacts | str:
    """Facts of the first visible GPU, or the reason why it cannot be used. A GPU gets a CUDA context by this."""
    if not torch.cuda.is_available() and not devices.has_gpu():
        return NO_DRIVER
    if torch.version.hip is not None:
        return "this torch is built for AMD GPUs, which are not used in this version"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU of NVIDIA"
    if find_spec("triton") is None:
        return "Triton is not installed"
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    if 10 * major + minor < devices.LEAST_CAPABILITY:
        return f"{name} is of compute capability {major}.{minor}, and the kernels need 8.0"
    free, total = torch.cuda.mem_get_info()
    uuid = str(torch.cuda.get_device_properties().uuid)
    return GpuFacts(name, 10 * major + minor, total, free, num_visible=torch.cuda.device_count(), uuid=uuid)


if __name__ == "__main__":
    found = detect()
    json.dump(found if isinstance(found, str) else asdict(found), sys.stdout)
