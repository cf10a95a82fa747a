"""Translates Hugging Face's config.json to the fields of ModelConfig. Its names stop in this folder. No torch."""
