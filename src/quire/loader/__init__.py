"""Loads weights into models: hub and folders, safetensors, GGUF, dummy weights, the choice of the model class."""
