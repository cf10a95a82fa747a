"""`quire quantize`: writes standard quantized checkpoints, layer by layer."""
