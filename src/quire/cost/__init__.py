"""Facts of the machine and the arithmetic of bytes and FLOPs that planning, defaults and the scheduler share."""
