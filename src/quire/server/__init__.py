"""The HTTP server: OpenAI's API with vLLM's extra fields on an AsyncEngine. It imports no torch and no
transformers.
"""
