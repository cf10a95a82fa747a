"""`quire simulate`: the real engine core over a worker whose steps are predicted, on a virtual clock. No torch."""
