"""The compiled CPU kernels. Only this file calls them.

A call is a struct of the extension. It is made from tensors and numbers by name, and then it runs. Arguments that are
constant for a layer have a struct of their own, which is made once and given to each call. The extension reads address,
sizes, strides and dtype from each tensor (csrc/tensor_view.h).

The functions trust the shapes, dtypes and strides of their arguments, because ops, dense, grouped, fp8, experts and
lora check them. csrc/bindings_*.cpp refuses indices that lead out of memory (IndexError) and other illegal numbers.

Dimensions: M rows, N out-features, K in-features; for the other ops see ops.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire import envs, extension
from quire.formats.weight_format import GroupedFormat
from quire.forward_batch import ForwardBatch, LayerCache
from quire.kernels.grouped_weight import GroupedWeight

if TYPE_CHECKING:
    from quire import _C as _C  # _C.pyi has the fields of each struct; programs that compare builds exchange it
    from quire.kernels.layer_rules import AttentionRule, HeadRotation, LatentRotation
    from quire.kernels.lora import RowAdapters
    from quire.kernels.routing import Routing, RoutingRule
else:
    _C = extension.C  # None: Quire was installed without a compiler, so ops run on plain torch

# enum class DType of csrc/include/quire/dtype.h
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# enum class Activation of csrc/include/quire/kernels/activation.h
ACTIVATION_CODES: dict[str, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}
# enums of csrc/include/quire/kernels/experts.h
SCORING_CODES: dict[str, int] = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2, "sparsemixer": 3}
GROUP_SCORE_CODES: dict[str, int] = {"max": 0, "top2": 1}
# enum class GroupNumbers of csrc/include/quire/kernels/grouped_layout.h
GROUP_NUMBERS_CODES: dict[str | None, int] = {None: 0, "float32": 1, "float16": 2, "int8": 3, "uint8": 4, "e8m0": 5}
# kMaxHeadDim of csrc/include/quire/kernels/kv_cache.h. Larger heads run on plain torch.
MAX_HEAD_DIM = 576
_PEAK_ROUNDS = 20_000  # rounds of multiply-adds in one measurement; they take less than a millisecond


def _load() -> bool:
    if not extension.is_used():
        return False
    if (isa := extension.wished_isa()) is not None:
        _C.set_isa(isa)
    if envs.NUM_THREADS.get() > 0:
        _C.set_num_threads(envs.NUM_THREADS.get())
    return True


_available = _load()
_recording = threading.Lock()  # held by threads that begin or end a recording


def available() -> bool:
    """Whether ops on CPU tensors run on the compiled kernels.

    They do if the kernels are built, and QUIRE_FORCE_REFERENCE was not set at the import.
    """
    return _available


def takes(x: Tensor) -> bool:
    """Whether ops on this tensor run on the compiled kernels."""
    return _available and x.device.type == "cpu" and x.dtype in DTYPE_CODES


class _RecordedExtension:
    """Replaces the extension while some threads record their kernel calls. Calls of other threads only run."""

    def __init__(self, recorded: Any) -> None:
        self.recorded = recorded
        self.calls: dict[int, list[Callable[[], Any]]] = {}  # the key is the thread

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.recorded, name)
        calls = self.calls.get(threading.get_ident())
        if calls is None or not (isinstance(member, type) and issubclass(member, self.recorded.KernelCall)):
            return member

        def make(**fields: Any) -> Any:
            call = member(**fields)
            calls.append(call.run)
            return call

        return make


@contextmanager
def recorded_calls() -> Iterator[list[Callable[[], Any]]]:
    """Record all kernel calls that this thread makes in the block. They also run.

    The calls can be repeated on the same addresses. A call has its own copy of addresses, sizes and numbers, and
    nothing changes them. It does not keep tensors alive.
    """
    calls: list[Callable[[], Any]] = []
    module, thread = globals(), threading.get_ident()  # to mypy, _C is a module, which nothing replaces
    with _recording:
        recorder = module["_C"]
        if not isinstance(recorder, _RecordedExtension):
            recorder = module["_C"] = _RecordedExtension(recorder)
        assert thread not in recorder.calls, "a thread makes one recording at a time"
        recorder.calls[thread] = calls
    try:
        yield calls
    finally:
        with _recording:
            del recorder.calls[thread]
            if not recorder.calls:
                module["_C"] = recorder.recorded


def isas() -> list[str]:
    """The names of the instruction sets that this CPU can run, the slowest first. Empty without the extension."""
    return _C.isas() if _available else []


def isa() -> str:
    """The name of the active instruction set; "none" without the extension."""
    return _C.isa() if _available else "none"


def set_isa(name: str) -> None:
    """Use instruction set `name` for every kernel from now on. Raises ValueError if this CPU does not have it."""
    if not _available:
        raise ValueError(f"cannot select instruction set {name!r}: the compiled kernels are not in use")
    _C.set_isa(name)


def get_num_threads() -> int:
    """The number of threads of the kernels' pool. The calling thread counts too."""
    return _C.num_threads() if _available else torch.get_num_threads()


def set_num_threads(n: int) -> None:
    """Set the number of threads of the kernels' pool. Raises ValueError if it is below 1.

    The default is `default_num_threads`.
    """
    if n < 1:
        raise ValueError(f"number of kernel threads must be at least 1, got {n}")
    if _available:
        _C.set_num_threads(n)


def default_num_threads() -> int:
    """The physical cores for this process: its affinity without hyper-thread siblings, limited by the cgroup quota."""
    return _C.default_num_threads() if _available else torch.get_num_threads()


def gemm_packed_bytes(dtype: torch.dtype, N: int, K: int) -> int:
    """The bytes of N rows in the panel layout of csrc/include/quire/kernels/gemm.h."""
    return _C.gemm_packed_bytes(dtype=DTYPE_CODES[dtype], n=N, k=K)


def gemm_pack(weight_NK: Tensor, packed: Tensor) -> None:
    """Copy a weight into the layout of `gemm_packed_bytes`, to the beginning of `packed`. Its rows may be strided."""
    _C.gemm_pack(weight=weight_NK, packed=packed)


def packed_weight(
    data: Tensor,
    N: int,
    K: int,
    form: _C.GroupedForm | None = None,
    order_K: Tensor | None = None,
    fp8_group_size: int = 0,
) -> _C.PackedWeight:
    """The struct of a weight in its panel layout, for `gemm` and `weight_rows`. The caller keeps the tensors alive.

    Args:
        data: the packed weight, uint8.
        form: the result of `grouped_form`, for a grouped integer weight.
        order_K: the order of the columns of a grouped weight, int32.
        fp8_group_size: the group size of an FP8 weight; 0: it is no FP8 weight.

    Without `form` and `fp8_group_size`, the weight has the dtype of x.
    """
    return _C.PackedWeight(data=data, n=N, k=K, form=form, order=order_K, fp8_group_size=fp8_group_size)


def gemm(
    x_MK: Tensor, weight: _C.PackedWeight, bias_N: Tensor | None, out_MN: Tensor, adapters: RowAdapters | None = None
) -> None:
    """Compute out = x @ weight.T + bias, plus the additions of adapters. `weight` is a result of `packed_weight`.

    Rows of x and out may be strided, and their last dimension is contiguous.
    """
    table, slots_M = (None, None) if adapters is None else (adapters.table.compiled, adapters.slots_T)
    _C.Gemm(x=x_MK, weight=weight, bias=bias_N, out=out_MN, adapters=table, adapter_slots=slots_M).run()


def gemm_heads(x_THK: Tensor, weight: _C.PackedWeight, out_THN: Tensor) -> None:
    """Compute out[:, h] = x[:, h] @ weight[h].T. The last dimension of x and out is contiguous.

    `weight` is the `packed_weight` of the first head. The weights of the other heads follow it in memory.
    """
    _C.HeadGemm(x=x_THK, weight=weight, out=out_THN).run()


def weight_rows(weight: _C.PackedWeight, rows_T: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """Rows [T, K] of a `packed_weight`, dequantized if necessary. Raises IndexError for a row that it does not have."""
    out_TK = torch.empty((len(rows_T), K), dtype=dtype)
    _C.WeightRows(weight=weight, rows=rows_T.contiguous(), out=out_TK).run()
    return out_TK


def grouped_form(grouped_format: GroupedFormat) -> _C.GroupedForm:
    """The format of a GroupedWeight as struct GroupedForm of csrc/include/quire/kernels/grouped_layout.h."""
    assert grouped_format.group_size is not None
    return _C.GroupedForm(
        bits=grouped_format.bits,
        group_size=grouped_format.group_size,
        scales=GROUP_NUMBERS_CODES[grouped_format.scales],
        offsets=GROUP_NUMBERS_CODES[grouped_format.offsets],
        super_size=grouped_format.super_size,
    )


def routing_rule(rule: RoutingRule) -> _C.RoutingRule:
    """A routing rule as struct RoutingRule of csrc/include/quire/kernels/experts.h."""
    return _C.RoutingRule(
        num_experts=rule.num_experts,
        num_active=rule.num_active,
        scoring=SCORING_CODES[rule.scoring],
        num_groups=rule.num_groups,
        num_active_groups=rule.num_active_groups,
        group_score=GROUP_SCORE_CODES[rule.group_score],
        normalizes=rule.normalizes,
        scale=rule.scale,
        jitter=rule.jitter,
    )


def route(
    logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None, routing: Routing, places_EC: Tensor | None = None
) -> None:
    """See experts.route. Rows of the logits may be strided."""
    _C.Route(
        logits=logits_TE,
        rule=rule.compiled,
        bias=bias_E,
        experts=routing.experts_TS,
        weights=routing.weights_TS,
        order=routing.order_P,
        begins=routing.begins,
        places=places_EC,
    ).run()


def expert_stack(first: _C.PackedWeight, num_experts: int) -> _C.ExpertStack:
    """The struct of experts' weights that follow each other in memory. `first` is the `packed_weight` of expert 0."""
    return _C.ExpertStack(first=first, num_experts=num_experts)


def expert_linear(
    x: Tensor,
    stack: _C.ExpertStack,
    routing: Routing,
    of_tokens: bool,
    bias_EN: Tensor | None,
    out_PN: Tensor,
    first_place: int = 0,
) -> None:
    """See experts.expert_linear. Rows of x and out may be strided. `stack`: a result of `expert_stack`."""
    _C.ExpertProduct(
        x=x,
        stack=stack,
        order=routing.order_P,
        begins=routing.begins,
        num_slots=routing.num_slots,
        of_tokens=of_tokens,
        bias=bias_EN,
        out=out_PN,
        first_place=first_place,
    ).run()


def combine(
    y_PD: Tensor, routing: Routing, shared_TD: Tensor | None, shared_gate_T1: Tensor | None, out_TD: Tensor
) -> None:
    """See experts.combine. Rows of all tensors except the routing may be strided."""
    _C.CombineExperts(
        y=y_PD,
        order=routing.order_P,
        weights=routing.weights_TS,
        shared=shared_TD,
        shared_gate=shared_gate_T1,
        out=out_TD,
    ).run()


def fp8_quantize(weight_NK: Tensor, codes_NK: Tensor, scales_N: Tensor) -> None:
    """See fp8.quantize_fp8."""
    _C.gemm_fp8_quantize(weight=weight_NK, codes=codes_NK, scales=scales_N)


def fp8_packed_bytes(N: int, K: int, group_size: int) -> int:
    """The bytes of N rows in the panel layout of csrc/include/quire/kernels/gemm_fp8.h."""
    return _C.gemm_fp8_packed_bytes(n=N, k=K, group_size=group_size)


def fp8_pack(codes_NK: Tensor, scales_NG: Tensor, group_size: int, packed: Tensor) -> None:
    """Copy an FP8 weight into the layout of `fp8_packed_bytes`, to the beginning of `packed`."""
    _C.gemm_fp8_pack(codes=codes_NK, scales=scales_NG, group_size=group_size, packed=packed)


def grouped_quantize(weight_NK: Tensor, bits: int, group_size: int, codes_NK: Tensor, scales_NG: Tensor) -> None:
    """See grouped.quantize_grouped."""
    _C.gemm_grouped_quantize(weight=weight_NK, bits=bits, group_size=group_size, codes=codes_NK, scales=scales_NG)


def grouped_packed_bytes(N: int, K: int, form: _C.GroupedForm) -> int:
    """The bytes of N rows in the panel layout of csrc/include/quire/kernels/grouped_layout.h. See `grouped_form`."""
    return _C.gemm_grouped_packed_bytes(n=N, k=K, form=form)


def grouped_pack(weight: GroupedWeight, packed: Tensor) -> None:
    """Copy a grouped weight into the layout of `grouped_packed_bytes`, to the beginning of `packed`.

    The weight's tensors are contiguous; only rows of the codes may be strided.
    """
    _C.gemm_grouped_pack(
        codes=weight.codes_NK,
        scales=weight.scales_NG,
        offsets=weight.zeros_NG if weight.minima_NG is None else weight.minima_NG,
        super_scales=weight.super_scales_NS,
        super_minima=weight.super_minima_NS,
        form=grouped_form(weight.format),
        packed=packed,
    )


def read_bandwidth(num_bytes: int = 1 << 29, repeats: int = 3) -> float:
    """Measure the rate of reading memory with all kernel threads, in bytes per second: the best of `repeats`.

    It needs the extension.
    """
    return _C.read_bandwidth(num_bytes, repeats)


def bandwidth_over(x: Tensor, repeats: int = 3) -> float:
    """Measure the rate of reading `x`, as read_bandwidth does. It is contiguous, and has 1 MiB or more."""
    return _C.bandwidth_over(x, repeats)


def peak_flops(dtype: torch.dtype, repeats: int = 3) -> float:
    """Measure the rate of multiply-adds in registers with all kernel threads, in FLOP/s: the best of `repeats`.

    It uses the active instruction set. bfloat16 uses AMX tiles or vdpbf16ps if they are active, and other dtypes use
    float32. It needs the extension.
    """
    return max(_C.peak_flops(DTYPE_CODES[dtype], _PEAK_ROUNDS) for _ in range(repeats))


def peak_int8_ops(bits: int = 8, repeats: int = 3) -> float:
    """Measure the rate of integer products, as with grouped weights: multiplications and additions per second.

    Args:
        bits: the bits of a code, 2 to 6 or 8, which is multiplied by an 8-bit integer. Only AVX2, and AVX-512 without
            VNNI, are faster with fewer bits.
    """
    return max(_C.peak_int8_ops(bits, _PEAK_ROUNDS) for _ in range(repeats))


def gather(
    group: _C.SharedGroup,
    part: Tensor,
    widths: Sequence[int],
    out: Tensor | None,
    owners: Tensor | None = None,
    reader: int | None = None,
) -> None:
    """See distributed.group.Group.gather. Raises GroupError or StepVoid.

    Args:
        out: memory for the result; None: this rank does not get it.
        owners: see Group.gather_rows; None: the result has all rows.
        reader: the only rank that gets the result; None: all ranks get it.
    """
    reader = -1 if reader is None else reader
    _C.Gather(group=group, widths=widths, owners=owners, reader=reader, part=part, out=out).run()


def exchange(
    group: _C.SharedGroup, rows_PN: Tensor, begins: Tensor, firsts: Sequence[int], first_column: int, out_PC: Tensor
) -> None:
    """See distributed.group.Group.exchange. Raises GroupError or StepVoid."""
    _C.Exchange(group=group, firsts=firsts, begins=begins, own=rows_PN, first_column=first_column, out=out_PC).run()


def advise_huge_pages(x: Tensor) -> None:
    """Ask the system for huge pages for a large contiguous CPU tensor that has not been written yet.

    The system may ignore this request. Without the extension, nothing happens.
    """
    if _available:
        _C.advise_huge_pages(x)


def norm(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    multiplier: float,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    weight_offset: float,
    out_TD: Tensor,
) -> None:
    """See ops.rms_norm, ops.layer_norm (with a bias) and their forms with a residual. Rows may be strided."""
    _C.Norm(
        x=x_TD,
        residual=residual_TD,
        multiplier=multiplier,
        weight=weight_D,
        bias=bias_D,
        eps=eps,
        weight_offset=weight_offset,
        out=out_TD,
    ).run()


def attention_rule(scale: float, sliding_window: int, soft_cap: float, chunk: int) -> _C.AttentionRule:
    """See layer_rules.AttentionRule."""
    return _C.AttentionRule(scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, chunk=chunk)


def head_rotation(rotation: HeadRotation) -> _C.HeadRotation:
    """The extension's struct of a HeadRotation. The caller keeps the tensors alive."""
    return _C.HeadRotation(
        cos_sin=rotation.cos_sin_PR,
        q_norm_weight=rotation.q_norm_weight_E,
        k_norm_weight=rotation.k_norm_weight_E,
        norm_eps=rotation.norm_eps,
        norm_weight_offset=rotation.norm_weight_offset,
        temperature=rotation.temperature,
        temperature_floor=rotation.temperature_floor,
    )


def _kv_cache(cache: LayerCache) -> _C.KvCache:
    """The extension's struct of a cache. It is made only once, because a LayerCache never gets other tensors."""
    if (made := cache.compiled) is None:
        made = _C.KvCache(k=cache.k_BGPE, v=cache.v_BGPE, k_scales=cache.k_scales_BGP, v_scales=cache.v_scales_BGP)
        object.__setattr__(cache, "compiled", made)  # the dataclass is frozen
    return made


def rope_and_cache(
    q_THE: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    cache: LayerCache,
    rotation: HeadRotation,
) -> None:
    """See ops.rope_and_cache."""
    _C.RopeAndCache(
        q=q_THE,
        k=k_TGE,
        v=v_TGE,
        positions=positions_T,
        slot_mapping=slot_mapping_T,
        cache=_kv_cache(cache),
        rotation=rotation.compiled,
    ).run()


def latent_rope_and_cache(
    q_THR: Tensor,
    rows_TL: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    cache: LayerCache,
    rotation: LatentRotation,
    out_THR: Tensor,
) -> None:
    """See ops.latent_rope_and_cache."""
    _C.LatentRopeAndCache(
        q=q_THR,
        rows=rows_TL,
        positions=positions_T,
        slot_mapping=slot_mapping_T,
        cache=_kv_cache(cache),
        cos_sin=rotation.cos_sin_PR,
        is_interleaved=rotation.is_interleaved,
        out=out_THR,
    ).run()


def paged_attention(
    q_THE: Tensor,
    cache: LayerCache,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    cu_seqlens_q_S1: Tensor,
    rule: AttentionRule,
    out_THE: Tensor,
    sinks_H: Tensor | None = None,
) -> None:
    """See ops.paged_attention."""
    _C.PagedAttention(
        q=q_THE,
        cache=_kv_cache(cache),
        block_tables=block_tables_SM,
        seq_lens=seq_lens_S,
        cu_seqlens_q=cu_seqlens_q_S1,
        rule=rule.compiled,
        sinks=sinks_H,
        out=out_THE,
    ).run()


def shared_attention(
    group: _C.SharedGroup,
    q_THE: Tensor,
    cache: LayerCache,
    batch: ForwardBatch,
    rule: AttentionRule,
    out_THV: Tensor,
    sinks_H: Tensor | None,
    members: tuple[int, int, int, int],
) -> None:
    """See distributed.group.Group.attend. Raises GroupError or StepVoid.

    Args:
        members: the rank of the first owner, the number of owners, the index of this rank among them, and its first
            query head.
    """
    first_member, num_owners, owner, first_result = members
    _C.SharedAttention(
        group=group,
        q=q_THE,
        cache=_kv_cache(cache),
        block_tables=batch.tables[cache.table].block_tables_SM,
        seq_lens=batch.seq_lens_S,
        cu_seqlens_q=batch.cu_seqlens_q_S1,
        rule=rule.compiled,
        sinks=sinks_H,
        out=out_THV,
        first_result=first_result,
        num_owners=num_owners,
        owner=owner,
        first_member=first_member,
    ).run()


def gated_activation(
    name: str,
    x_T2I: Tensor,
    out_TI: Tensor,
    factors_F: Tensor | None = None,
    order_T: Tensor | None = None,
    begins: Tensor | None = None,
) -> None:
    """See ops.gated_activation. `name` is a key of ACTIVATION_CODES. Rows may be strided."""
    code = ACTIVATION_CODES[name]
    _C.GatedActivation(activation=code, x=x_T2I, factors=factors_F, order=order_T, out=out_TI, begins=begins).run()


def lora_table(words_SP4: Tensor, dtype: torch.dtype, K: int, columns: Sequence[int]) -> _C.LoraTable:
    """See lora.LoraTable. The caller keeps the tensor alive."""
    return _C.LoraTable(deltas=words_SP4, dtype=DTYPE_CODES[dtype], k=K, columns=list(columns))


def pack_factors(source: Tensor, factors_F6: Tensor, memory: Tensor) -> None:
    """See lora.pack_factors. It runs in the calling thread alone."""
    _C.pack_factors(source=source, factors=factors_F6, memory=memory)


def add_lora(
    table: _C.LoraTable,
    x_TK: Tensor | None,
    token_ids_T: Tensor | None,
    slots_T: Tensor,
    base_TN: Tensor,
    out_TN: Tensor,
) -> None:
    """See lora.add_lora. Exactly one of x and token_ids is given."""
    _C.AddLora(table=table, x=x_TK, token_ids=token_ids_T, slots=slots_T, base=base_TN, out=out_TN).run()


def forbid_tokens(logits_RV: Tensor, masks_MW: Tensor, rows_M: Tensor) -> None:
    """See ops.forbid_tokens."""
    _C.ForbidTokens(logits=logits_RV, masks=masks_MW, rows=rows_M).run()


def greedy(logits_RV: Tensor, token_ids_R: Tensor) -> None:
    """See ops.greedy."""
    _C.Greedy(logits=logits_RV, token_ids=token_ids_R).run()


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    uniform_R: Tensor,
    token_ids_R: Tensor,
) -> None:
    """See ops.sample."""
    _C.Sample(
        logits=logits_RV,
        temperature=temperature_R,
        top_k=top_k_R,
        top_p=top_p_R,
        min_p=min_p_R,
        uniform=uniform_R,
        token_ids=token_ids_R,
    ).run()


def logprobs(
    logits_RV: Tensor,
    token_ids_R: Tensor,
    token_logprobs_R: Tensor,
    ranks_R: Tensor,
    top_ids_RN: Tensor,
    top_logprobs_RN: Tensor,
) -> None:
    """See ops.logprobs."""
    _C.Logprobs(
        logits=logits_RV,
        token_ids=token_ids_R,
        token_logprobs=token_logprobs_R,
        ranks=ranks_R,
        top_ids=top_ids_RN,
        top_logprobs=top_logprobs_RN,
    ).run()
