"""Module paths of vLLM's scripts under our package's name. Nothing of ours imports them."""
