"""The specs of a model's layers: their parts, shapes, content of the cache, and how ranks share them. No torch."""
