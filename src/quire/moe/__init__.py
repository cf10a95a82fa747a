"""Mixture of experts: the layer, and the weights of its experts."""
