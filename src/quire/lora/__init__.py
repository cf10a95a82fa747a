"""LoRA adapters: small additions to the weights of a model, a different one for each request of a batch.

W' = W + s B A, with A [R, K] and B [N, R] (Hu et al. 2021, "LoRA", section 4.1). The products with A and B are computed
beside the product with W, so one batch mixes requests with any adapters and without.
"""
