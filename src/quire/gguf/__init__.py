"""GGUF files: the format, and our names for llama.cpp's names. No torch: the API process reads them too."""
