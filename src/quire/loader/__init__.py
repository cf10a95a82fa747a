"""Brings weights into models: hub and folders, safetensors, dummy weights, the choice of the model class."""
