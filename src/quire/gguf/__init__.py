"""GGUF files: the format, and what llama.cpp's names in them mean here. No torch: the API process reads them too."""
