"""Hugging Face's config.json translated to the fields of ModelConfig. Their names stop in this folder. No torch."""
