"""`quire quantize`: writes quantized checkpoints, a layer at a time."""
