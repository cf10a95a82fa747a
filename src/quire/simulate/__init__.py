"""`quire simulate`: the real engine core over predicted steps, on a virtual clock. No torch."""
