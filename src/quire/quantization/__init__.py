"""How a linear layer stores its weight and multiplies with it: one scheme per format."""
