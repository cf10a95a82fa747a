"""Schemes of linear layers: one per format. A scheme stores the weight and multiplies by it."""
