"""The HTTP server: OpenAI's API with vLLM's extra fields on an AsyncEngine. Imports neither torch nor transformers."""
