"""`quire quality`: measures the distance between a model's predictions and its original's, in defined numbers."""
