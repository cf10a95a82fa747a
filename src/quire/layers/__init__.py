"""Building blocks of a decoder: linear layers, embeddings, norms, rotary tables, activations."""
