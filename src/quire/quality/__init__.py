"""`quire quality`: how far a model's predictions are from those of its original, in numbers with a definition."""
