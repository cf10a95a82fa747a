"""Attention of one layer: its state from step to step."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.backend import AttentionSpec
from quire.attention.layer import Attention, Sinks
from quire.attention.select import select_backend
from quire.layers.norm import RMSNorm
from tests.attention.test_backends import SPECS, make_batch


def make_layer(spec: AttentionSpec, weights: tuple[Tensor, Tensor]) -> tuple[Attention, list[RMSNorm]]:
    norms = [RMSNorm(spec.head_dim, 1e-6, 0.0, spec.dtype) for _ in weights]
    for norm, weight_E in zip(norms, weights, strict=True):
        norm.weight_D = weight_E
    return Attention(0, select_backend(spec, torch.device("cpu")), None, *norms), norms


def test_sinks_take_a_part_of_the_weights() -> None:
    """With one token, whose score is 0, a sink of log(3) leaves a quarter for the value."""
    spec = replace(SPECS["plain"], has_sinks=True)
    sinks = Sinks(spec.num_q_heads, spec.dtype)
    dict(sinks.slots())["sinks"].load(torch.full((spec.num_q_heads,), math.log(3)))
    layer = Attention(0, select_backend(spec, torch.device("cpu")), None, sinks=sinks)
    batch, _, _, queries = make_batch(spec, 8, [(1, 1)])
    (table,) = batch.tables
    table.slot_mapping_T = table.block_tables_SM[0, 0].long()[None] * 8
    ones = torch.ones(1, spec.num_kv_heads, spec.head_dim)
    torch.testing.assert_close(layer(queries * 0, ones, ones, batch), torch.full_like(queries, 0.25))


def test_weights_of_norms_may_be_loaded_after_a_step() -> None:
    spec = SPECS["grouped"]
    old, new = torch.rand(2, 2, spec.head_dim)
    layer, norms = make_layer(spec, (old[0], old[1]))
    for weights in ((old[0], old[1]), (new[0], old[1]), (new[0], new[1])):
        results = []
        for norm, weight_E in zip(norms, weights, strict=True):
            norm.weight_D = weight_E
        for each in (layer, make_layer(spec, weights)[0]):
            batch, _, _, queries = make_batch(spec, 8, [(3, 3)])
            k_TGE = torch.ones(3, spec.num_kv_heads, spec.head_dim)
            (table,) = batch.tables
            table.slot_mapping_T = table.block_tables_SM[0, 0].long() * 8 + torch.arange(3)
            results.append(each(queries, k_TGE, k_TGE, batch))
        assert torch.equal(*results)
