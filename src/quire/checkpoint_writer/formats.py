"""The formats of `quire quantize --to`. No torch."""

FORMATS = {
    "int4": "compressed-tensors, 4 bits in groups, rounded to the nearest; activations stay as they are",
    "int8": "compressed-tensors, 8 bits per output channel; activations are quantized per token while it runs",
    "fp8": "compressed-tensors, e4m3 per output channel; activations per token where the hardware multiplies e4m3",
    "gptq": "GPTQ, 4 bits in groups; rounding errors are made up for, on calibration text (arXiv 2210.17323)",
    "awq": "AutoAWQ, 4 bits in groups with zero points; in-features scaled on calibration text (arXiv 2306.00978)",
}
