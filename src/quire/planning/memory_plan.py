"""The memory of the KV cache, and the error if it does not suffice: after loading, or for a start that is only planned.

The bytes planned here are the bytes the allocator takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from quire import envs
from quire.config import EngineConfig
from quire.errors import MemoryPlanError
from quire.formats.kv_format import KvFormat, kv_format
from quire.formats.kv_groups import KvGroup, kv_groups, longest_request, page_bytes, pages_for
from quire.formats.weight_format import packs_floats
from quire.layer_spec.attention import Full, Latent
from quire.layer_spec.feed_forward import Dense, Experts
from quire.layer_spec.layer import LayerSpec
from quire.model_config import DTYPE_BYTES, ModelConfig
from quire.option import Source
from quire.resolve import GIB, DeviceFacts, shown_bytes
from quire.settings import MemorySettings, Planned, Record, Resolved, Setting
from quire.speculative_config import text_index_bytes

# Tokens of context per running request that the default KV cache is cut to: more could only hold evictable prefixes.
MAX_USEFUL_CONTEXTS = 2
RESERVE_SHARE = 0.05  # the share of all memory that is left to the operating system and the allocator
GPU_RESERVE_SHARE = 0.02  # the same for a GPU: fragments of the allocator, and libraries that load kernels late
FREE_MEMORY_MARGIN = 0.95  # advice counts this share of the free memory, which will differ at the next start
MIN_SUGGESTED_BUDGET = 256  # tokens per step; below it prompts become slow
CHAT_TOKENS = 4096  # tokens of a chat of medium length
LOGITS_COPIES = 2  # float32 rows of logits held at once: the model's, and the sampler's scratch
# The heap of a CPU takes 2.7 to 3.8 times the buffers that live at once (benchmarks/NOTES.md). The reserve covers the
# rest.
HEAP_FACTOR = 3


@dataclass(frozen=True)
class MemoryFacts:
    """The bytes when the KV cache is planned: after the weights are loaded, or predicted for this moment."""

    total_bytes: int
    free_bytes: int  # free memory; the weights are already subtracted
    weight_bytes: int
    work_bytes: int  # the work memory of a step with the full token budget, with its logits
    logits_bytes: int = 0  # the part of work_bytes that does not shrink with the token budget
    is_predicted: bool = False  # weights and work are from config.json, not measured
    work_detail: str = ""  # how work was measured; empty: the buffers of a short step, scaled
    drafter_weight_bytes: int = 0  # the part of weight_bytes that is the drafter's
    draft_text_bytes: int = 0  # host memory for the texts in which drafts are searched; on a CPU it is a part of work
    lora_bytes: int = 0  # the part of work_bytes for adapters
    taken_bytes: int = 0  # the memory that this process has taken so far, with its weights; only on a CPU


def logits_bytes(model: ModelConfig, num_rows: int, device: str) -> int:
    """Bytes of this number of rows of logits, and of the drafter's rows."""
    own = num_rows * 4 * max(model.vocab_size * LOGITS_COPIES, _joined_elements(model, device))
    own = own if model.has_output else 0
    return own if model.drafter is None else own + logits_bytes(model.drafter, num_rows, device)


def _joined_elements(model: ModelConfig, device: str) -> int:
    """Elements that live at once while ranks join a row of logits on a GPU; 0: they join it without more memory.

    These are the part of this rank, the parts of all ranks with their padding, and the row: see DeviceGroup.gather.
    """
    if device == "cpu" or model.vocab_share is None:
        return 0
    widths = model.vocab_share.widths(0)
    own = widths[model.vocab_share.rank]
    padded = 0 if own == max(widths) else max(widths)
    return own + padded + max(widths) * len(widths) + sum(widths)


def work_bytes(buffer_bytes: int, device: str) -> int:
    """Bytes that a step takes for buffers of `buffer_bytes` that live at once."""
    return buffer_bytes * HEAP_FACTOR if device == "cpu" else buffer_bytes


def buffer_bytes(model: ModelConfig, num_tokens: int, dtype: str, device: str) -> int:
    """Bytes of the buffers that live at once in a forward pass of a native model, without logits: see models/block.py.

    A drafter runs after its target, so the larger of them counts.
    """
    widest = max((_buffer_width(model, layer, device) for layer, _ in model.layer_kinds), default=model.hidden_size)
    own = num_tokens * widest * DTYPE_BYTES[dtype]
    return own if model.drafter is None else max(own, buffer_bytes(model.drafter, num_tokens, dtype, device))


def _buffer_width(model: ModelConfig, layer: LayerSpec, device: str) -> int:
    """Elements per token: the residual stream, its norm, and the tensors of a layer's part that live together."""
    widest = 0
    for part, norms in layer.parts:
        if isinstance(part, Full):  # the heads' results, beside q, k and v, and then beside the output
            inner = part.output.in_features + max(part.qkv.out_features, model.hidden_size)
        elif isinstance(part, Latent):  # queries and rows beside queries of latents; then these beside heads' latents
            queries, latents = part.num_heads * (part.rank + part.rope_dim), part.num_heads * part.rank
            own = part.input.out_features + (0 if part.query is None else part.query.out_features)
            inner = max(own + queries, queries + latents, part.output.in_features + max(latents, model.hidden_size))
        elif isinstance(part, Dense):  # both inputs of the activation, and its result
            inner = part.width + part.down.in_features
        elif isinstance(part, Experts):
            # inputs of each active expert; then the results beside the shared expert's, and out
            inner = part.num_active * _of_mlp(part.expert, model.hidden_size)
            results = part.num_active * model.hidden_size
            if part.placement is not None:  # its columns of all experts' results beside the results of its own experts
                columns = part.placement.columns
                results += part.num_active * len(columns[0])
                if device == "cuda":  # columns of all rows that are sent to all ranks and got from them
                    results += part.num_active * 2 * len(columns) * len(columns[0])
            if part.shared is not None:
                inner = max(inner, results + _of_mlp(part.shared, model.hidden_size))
                results += model.hidden_size
            inner = max(inner, results + model.hidden_size)
            if part.placement is not None and (num_lanes := part.placement.num_lanes) > 1:  # beside the rows of all
                inner = num_lanes * (inner + model.hidden_size)
        else:
            inner = sum(linear.out_features for linear in layer.active_linears())
        own_norm = 0 if norms.before is None else model.hidden_size
        widest = max(widest, own_norm + inner, own_norm + 2 * model.hidden_size)  # at last the result and its norm
    return model.hidden_size + widest


def _of_mlp(part: Dense, hidden_size: int) -> int:
    """Elements per token: both inputs of the activation with its result, or this result with the MLP's output."""
    inner = part.down.in_features
    return inner + max(part.width, hidden_size)


def planned_weight_bytes(resolved: Resolved, model: ModelConfig) -> int:
    """Bytes that the weights will take in memory once they are loaded, also the drafter's weights."""
    is_packed = packs_floats(resolved.device.isa)
    own = model.weight_bytes(resolved.model.dtype, resolved.model.quantization, is_packed=is_packed)
    return own + _drafter_weight_bytes(resolved, model)


def _drafter_weight_bytes(resolved: Resolved, model: ModelConfig) -> int:
    return 0 if resolved.drafter is None else resolved.drafter.weight_bytes(model, resolved.device.isa)


def predict_memory(
    resolved: Resolved, model: ModelConfig, device: DeviceFacts, weight_bytes: int | None = None
) -> MemoryFacts:
    """Memory as it will be after loading: weights from config.json, and the buffers of a step.

    Args:
        weight_bytes: bytes of the weights of the model alone, if they have been counted.
    """
    drafter = _drafter_weight_bytes(resolved, model)
    weights = planned_weight_bytes(resolved, model) if weight_bytes is None else weight_bytes + drafter
    logits = logits_bytes(model, resolved.scheduler.num_logits_rows, resolved.device.device)
    steps, hidden = resolved.scheduler, 0
    if resolved.drafter is not None:
        hidden = resolved.drafter.hidden_bytes(model, steps.max_num_seqs, steps.most_tokens)
    buffers = buffer_bytes(model, steps.max_num_batched_tokens, resolved.model.dtype, resolved.device.device)
    total, free = device.memory_of(resolved.device.device)
    facts = MemoryFacts(
        total_bytes=total,
        free_bytes=free - weights,
        weight_bytes=weights,
        work_bytes=work_bytes(buffers, resolved.device.device) + hidden + logits,
        logits_bytes=logits,
        is_predicted=True,
        drafter_weight_bytes=drafter,
    )
    return with_later_bytes(resolved, model, facts)


def with_later_bytes(resolved: Resolved, model: ModelConfig, memory: MemoryFacts) -> MemoryFacts:
    """The facts with the memory that requests will need: adapters, and the texts in which drafts are searched.

    These texts belong to running requests, which are in the KV cache too.
    """
    lora = 0 if resolved.lora is None else resolved.lora.num_bytes(model)
    memory = replace(memory, work_bytes=memory.work_bytes + lora, lora_bytes=lora)
    pages, steps = KvPages.of(resolved, model), resolved.scheduler
    num_cached = max(memory.free_bytes, 0) // pages.page_bytes * pages.block_size
    num_bytes = text_index_bytes(steps.speculation, min(steps.max_num_seqs * resolved.model.max_model_len, num_cached))
    work = memory.work_bytes + (num_bytes if resolved.device.device == "cpu" else 0)
    return replace(memory, work_bytes=work, draft_text_bytes=num_bytes)


@dataclass(frozen=True)
class KvPages:
    """The KV cache of a model's requests with some settings.

    Attributes:
        step_tokens: most tokens of one request in a step.
        depth: most steps in flight.
        page_bytes: the bytes of a page (the pool calls it a block), with a drafter's part. If there are several owners,
            the mean bytes of a page on each owner.
        num_owners: the number of ranks that share the pages. Each has an equal number of them.
    """

    groups: tuple[KvGroup, ...]
    block_size: int
    step_tokens: int
    depth: int
    page_bytes: int
    num_owners: int = 1

    @classmethod
    def of(cls, resolved: Resolved, model: ModelConfig, kv: KvFormat | None = None) -> KvPages:
        """The KV cache for these settings, in their format or in another one."""
        groups, kv = kv_groups(model), kv or kv_format(resolved.model.kv_cache_dtype, resolved.model.dtype)
        size, steps, num_owners = (
            resolved.model.block_size,
            resolved.scheduler,
            resolved.model.decode_context_parallel_size,
        )
        num_bytes = page_bytes(groups, kv, size, num_owners) // num_owners
        if resolved.drafter is not None:
            num_bytes += resolved.drafter.layers(model).page_bytes(size)
        return cls(groups, size, steps.max_num_batched_tokens, steps.depth, num_bytes, num_owners)

    def num_within(self, num_bytes: int) -> int:
        """The number of pages for which each rank needs this number of bytes."""
        num_pages = max(num_bytes, 0) // self.page_bytes
        return num_pages - num_pages % self.num_owners

    def for_request(self, num_tokens: int) -> int:
        """The most pages of one request."""
        num_pages = pages_for(self.groups, num_tokens, self.block_size, self.depth * self.step_tokens)
        return -(-num_pages // self.num_owners) * self.num_owners

    def longest(self, num_pages: int) -> int:
        """The tokens of the longest request that this number of pages holds."""
        return longest_request(self.groups, num_pages, self.block_size, self.depth * self.step_tokens)

    def num_requests(self, num_pages: int, num_tokens: int) -> int:
        """The number of decoding requests of `num_tokens` tokens that fit. They share nothing."""
        if self.for_request(num_tokens) > num_pages:
            return 0
        return num_pages // self.while_decoding(num_tokens)

    def num_tokens(self, num_pages: int, length: int) -> int:
        """The number of tokens that fit, in decoding requests of `length` tokens each."""
        num_blocks = -(-length // self.block_size)
        return num_pages * num_blocks * self.block_size // self.while_decoding(length)

    def while_decoding(self, num_tokens: int) -> int:
        """The pages of a decoding request of `num_tokens` tokens."""
        return pages_for(self.groups, num_tokens, self.block_size, self.depth)

    def lines(self, length: int, kv: KvFormat) -> Iterator[str]:
        """For people: a line per group, with the pages of a request of `length` tokens on each owner."""
        for group in self.groups:
            tables = f" in {group.num_tables} block tables" if group.num_tables > 1 else ""
            window = f" of {group.spec.window:,} tokens" if group.spec.window else ""
            num_bytes = group.num_tables * group.most_blocks(length, self.block_size, self.depth) * self.page_bytes
            per_token = len(group.layers) * group.spec.bytes_per_token(kv) // self.num_owners
            yield (
                f"{len(group.layers)} x {group.spec.kind}{window}{tables}: {per_token:,} bytes per token, "
                f"{shown_bytes(num_bytes)} for {length:,} tokens"
            )


@dataclass(frozen=True)
class _Offer:
    """The bytes that the KV cache may take, and the reason."""

    num_bytes: int  # negative if weights and work take more than is allowed
    source: Source
    detail: str
    is_measured: bool  # moves with what else runs on the machine
    is_all_that_is_free: bool = False  # because nothing was said of it


def plan_kv_cache(config: EngineConfig, model: ModelConfig, resolved: Resolved, memory: MemoryFacts) -> Planned:
    """All settings, also the settings of memory; max_model_len -1 is cut to what fits.

    Raises MemoryPlanError naming the missing bytes and the changes that would fit.
    """
    record = Record(resolved.settings)
    record.update(memory_settings(model, resolved, memory))
    pages = KvPages.of(resolved, model)
    offer, length_limits = _useful(_offer(config, resolved, memory, pages.page_bytes), resolved, pages)
    num_blocks = pages.num_within(offer.num_bytes)
    length = length_that_starts(config, resolved, pages, num_blocks)
    if length < resolved.model.max_model_len:
        detail = f"{num_blocks} blocks of {pages.page_bytes:,} bytes fit; the model allows {model.max_model_len}"
        record.put("max_model_len", length, "formula", detail)
    record["max_model_len"] = replace(record["max_model_len"], limits=length_limits)
    if num_blocks < pages.for_request(length):
        raise _Shortage(config, model, resolved, memory, offer, pages, pages.for_request(length)).error()
    record.put("num_blocks", num_blocks, offer.source, offer.detail)
    kv_bytes = num_blocks * pages.page_bytes
    record.put("kv_cache_bytes", kv_bytes, "formula", f"{num_blocks} blocks x {pages.page_bytes:,} bytes")
    num_tokens, chat = pages.num_tokens(num_blocks, length), min(CHAT_TOKENS, length)
    record.put("kv_cache_tokens", num_tokens, "formula", f"in requests of {length:,} tokens that decode")
    chats = pages.num_requests(num_blocks, chat)
    record.put("kv_cache_chats", chats, "formula", f"requests of {chat:,} tokens that decode")
    detail = f"{memory.free_bytes:,} free after the weights - {kv_bytes:,} KV cache - {memory.work_bytes:,} work"
    unplanned = record.put("unplanned_bytes", memory.free_bytes - kv_bytes - memory.work_bytes, "measured", detail)
    return Planned(
        replace(resolved.model, max_model_len=length),
        resolved.device,
        resolved.scheduler,
        record,
        MemorySettings(memory.weight_bytes, memory.work_bytes, num_blocks, kv_bytes, unplanned),
        drafter=resolved.drafter,
        lora=resolved.lora,
    )


def length_that_starts(config: EngineConfig, resolved: Resolved, pages: KvPages, num_blocks: int) -> int:
    """max_model_len; -1 is cut to the number of blocks."""
    most, wanted = pages.longest(num_blocks), resolved.model.max_model_len
    return most if config.max_model_len == -1 and 0 < most < wanted else wanted


def bytes_for_kv_cache(
    config: EngineConfig, resolved: Resolved, memory: MemoryFacts, pages: KvPages
) -> tuple[int, str]:
    """The bytes that fit, also beyond the need of a start's running requests, and the reason.

    Negative if weights, work and reserve exceed the memory.
    """
    offer = _offer(config, resolved, memory, pages.page_bytes)
    return offer.num_bytes, offer.detail


def memory_settings(model: ModelConfig, resolved: Resolved, memory: MemoryFacts) -> Mapping[str, Setting]:
    """The memory of weights and work, by name: known even if no KV cache fits."""
    record, quantization = Record(), resolved.model.quantization
    num_rows, budget = resolved.scheduler.num_logits_rows, resolved.scheduler.max_num_batched_tokens
    weights = f"{model.num_parameters():,} parameters"
    weights += f" x {DTYPE_BYTES[resolved.model.dtype]} bytes" if quantization is None else ", scales included"
    logits = f"{memory.logits_bytes:,} for the logits of {num_rows} tokens"
    buffers = f"{HEAP_FACTOR} x the buffers" if resolved.device.device == "cpu" else "the buffers"
    if memory.is_predicted:
        record.put("weight_bytes", memory.weight_bytes, "formula", weights)
        detail = f"{buffers} of the widest layer for {budget} tokens, and {logits}"
        record.put("work_bytes", memory.work_bytes, "formula", detail)
    else:
        record.put("weight_bytes", memory.weight_bytes, "measured", weights)
        detail = memory.work_detail or f"{buffers} of a short step, scaled to {budget} tokens, and {logits}"
        record.put("work_bytes", memory.work_bytes, "measured", detail)
    if memory.draft_text_bytes:
        part = "a part of work_bytes" if resolved.device.device == "cpu" else "host memory"
        detail = f"at most, for texts in which drafts are searched; {part}"
        record.put("draft_text_bytes", memory.draft_text_bytes, "formula", detail)
    if (lora := resolved.lora) is not None:
        detail = f"{lora.max_cpu_loras} adapters, and one that takes the place of another, of rank {lora.max_rank}"
        detail = f"at most, for {detail}, and what is read of a file; a part of work_bytes"
        record.put("lora_bytes", memory.lora_bytes, "formula", detail)
    if (drafter := model.drafter) is not None and resolved.drafter is not None:
        source: Source = "formula" if memory.is_predicted else "measured"
        detail = f"{drafter.num_parameters():,} parameters; a part of weight_bytes"
        record.put("drafter_weight_bytes", memory.drafter_weight_bytes, source, detail)
        detail = f"of {num_rows} tokens; a part of work_bytes"
        record.put("drafter_logits_bytes", logits_bytes(drafter, num_rows, resolved.device.device), "formula", detail)
        if drafter.head is not None:
            steps = resolved.scheduler
            hidden = resolved.drafter.hidden_bytes(model, steps.max_num_seqs, steps.most_tokens)
            detail = f"of a step, and of {resolved.drafter.positions_kept} tokens of each request; a part of work_bytes"
            record.put("drafter_hidden_bytes", hidden, "formula", detail)
        layers = resolved.drafter.layers(model)
        detail = f"{len(layers.specs)} layers in {layers.kv.name}, in the blocks of the model"
        record.put("drafter_kv_bytes_per_token", resolved.drafter.kv_bytes_per_token(model), "formula", detail)
    return record


def _offer(config: EngineConfig, resolved: Resolved, memory: MemoryFacts, block_bytes: int) -> _Offer:
    """The bytes for the KV cache, from the first of these that is given, in vLLM's order.

    They are the number of blocks, the bytes, the environment variable, the share of memory, and the free memory.
    """
    if config.num_gpu_blocks_override is not None:
        source = config.sources["num_gpu_blocks_override"]
        return _Offer(config.num_gpu_blocks_override * block_bytes, source, "num_gpu_blocks_override", False)
    per_block = f"{block_bytes:,} bytes per block"
    if config.kv_cache_memory_bytes is not None:
        source = config.sources["kv_cache_memory_bytes"]
        return _Offer(config.kv_cache_memory_bytes, source, f"kv_cache_memory_bytes / {per_block}", False)
    if resolved.device.device == "cpu" and (gib := envs.CPU_KVCACHE_SPACE.get()) > 0:
        detail = f"VLLM_CPU_KVCACHE_SPACE = {gib} GiB / {per_block}"
        return _Offer(int(gib * GIB), "environment", detail, False)
    reserve_share = RESERVE_SHARE if resolved.device.device == "cpu" else GPU_RESERVE_SHARE
    reserve = memory.work_bytes + int(memory.total_bytes * reserve_share)
    free = memory.free_bytes - reserve
    free_detail = (
        f"{memory.free_bytes:,} free after the weights - {reserve:,} reserve "
        f"(work {memory.work_bytes:,} + {reserve_share:.0%} of {memory.total_bytes:,}), / {per_block}"
    )
    if (share := resolved.device.gpu_memory_utilization) is not None:
        allowed = int(memory.total_bytes * share) - memory.weight_bytes - memory.work_bytes
        detail = (
            f"{share} x {memory.total_bytes:,} total - {memory.weight_bytes:,} weights - {memory.work_bytes:,} work, "
            f"/ {per_block}"
        )
        if allowed <= free:
            return _Offer(allowed, "formula", detail, True)
        return _Offer(free, "measured", f"less than --gpu-memory-utilization allows ({detail}): {free_detail}", True)
    return _Offer(free, "measured", free_detail, True, is_all_that_is_free=True)


def _useful(offer: _Offer, resolved: Resolved, pages: KvPages) -> tuple[_Offer, str]:
    """The default: not all free memory, but the bytes that running requests need, and the effect of max_model_len."""
    length, num_requests = resolved.model.max_model_len, resolved.scheduler.max_num_seqs
    useful = pages.for_request(length) * num_requests * MAX_USEFUL_CONTEXTS
    if not offer.is_all_that_is_free or useful * pages.page_bytes >= offer.num_bytes:
        return offer, "tokens of one request; not how many tokens the KV cache holds for all"
    detail = f"{MAX_USEFUL_CONTEXTS} full contexts per running request are enough; more would fit: {offer.detail}"
    limits = (
        f"tokens of one request, and the KV cache: {MAX_USEFUL_CONTEXTS} contexts of {length:,} tokens for each of "
        f"{num_requests:,} running requests take {useful:,} blocks, and {offer.num_bytes // pages.page_bytes:,} would "
        "fit; --kv-cache-memory-bytes gives the KV cache a size of its own"
    )
    return _Offer(useful * pages.page_bytes, "formula", detail, False), limits


@dataclass(frozen=True)
class _Shortage:
    """A plan whose KV cache is too small for one request."""

    config: EngineConfig
    model: ModelConfig
    resolved: Resolved
    memory: MemoryFacts
    offer: _Offer
    pages: KvPages
    blocks_needed: int

    def error(self) -> MemoryPlanError:
        """The missing bytes, and the changes that would fit."""
        needed, offered, memory = self.blocks_needed * self.pages.page_bytes, self.offer.num_bytes, self.memory
        fixes = self._fixes()
        return MemoryPlanError(
            f"The KV cache for one request of {self.resolved.model.max_model_len} tokens does not fit: "
            f"{shown_bytes(needed)} needed, {shown_bytes(max(offered, 0))} available, "
            f"{shown_bytes(needed - offered)} missing "
            f"(weights {shown_bytes(memory.weight_bytes)}, work {shown_bytes(memory.work_bytes)}, "
            f"free {shown_bytes(memory.free_bytes)} of {shown_bytes(memory.total_bytes)})",
            fix="Use one of: " + "; ".join(fixes) if fixes else "Free memory, or use a smaller model",
            param="max_model_len",
        )

    def _fixes(self) -> list[str]:
        """Single changes. Each makes the same start succeed."""
        config, resolved, memory, offer = self.config, self.resolved, self.memory, self.offer
        needed = self.blocks_needed * self.pages.page_bytes
        missing = needed - offer.num_bytes
        fixes = []
        available = int(offer.num_bytes * (FREE_MEMORY_MARGIN if offer.is_measured else 1))
        fitting = self.pages.longest(self.pages.num_within(available))
        if fitting > 0:
            fixes.append(f"--max-model-len {fitting}")
        if config.num_gpu_blocks_override is not None:
            fixes.append(f"--num-gpu-blocks-override {self.blocks_needed}")
        elif needed <= memory.free_bytes - memory.work_bytes:
            fixes.append(f"--kv-cache-memory-bytes {needed}")
        with_half_weights = offer.num_bytes + (memory.weight_bytes // 2 if offer.is_measured else 0)
        halved = self._needed_in(kv_format(resolved.model.kv_cache_dtype, "bfloat16"))
        if resolved.model.dtype == "float32" and config.num_gpu_blocks_override is None and with_half_weights >= halved:
            what = "weights and KV cache" if halved < needed else "the weights"
            fixes.append(f"--dtype bfloat16 (halves {what})")
        codes = self._needed_in(kv_format("fp8", resolved.model.dtype))
        if config.num_gpu_blocks_override is None and codes < needed and codes <= available:
            fixes.append("--kv-cache-dtype fp8 (shrinks the KV cache, at a cost in quality)")
        budget, lowest = (
            resolved.scheduler.max_num_batched_tokens,
            max(resolved.scheduler.max_num_seqs, MIN_SUGGESTED_BUDGET),
        )
        if offer.is_measured and config.enable_chunked_prefill and budget > lowest:
            fixed = memory.logits_bytes + memory.lora_bytes
            fixed += memory.draft_text_bytes if resolved.device.device == "cpu" else 0
            saved = (memory.work_bytes - fixed) * (budget - lowest) // budget
            if saved >= missing:
                fixes.append(f"--max-num-batched-tokens {lowest} (less work memory, slower prompts)")
        if offer.is_measured and resolved.lora is not None:
            each = resolved.lora.adapter_bytes(self.model)
            most = resolved.lora.max_cpu_loras - -(-missing // each)
            if most >= resolved.lora.max_loras:
                fixes.append(f"--max-cpu-loras {most} (others are read again when they are asked)")
            elif most >= 1:
                fixes.append(f"--max-loras {most} --max-cpu-loras {most} (requests of more adapters wait)")
        return fixes

    def _needed_in(self, kv: KvFormat) -> int:
        """The bytes of the same number of pages in another format."""
        return self.blocks_needed * KvPages.of(self.resolved, self.model, kv).page_bytes


def weights_do_not_fit(
    resolved: Resolved, weight_bytes: int, total_bytes: int, num_replicas: int = 1
) -> MemoryPlanError:
    """The error for a model whose weights need more memory than the machine has for each replica."""
    fix = "Use a smaller model, or a machine with more memory"
    if resolved.model.quantization is None and weight_bytes // 4 < total_bytes:
        fix = "Use --quantization int8, fp8 or int4 (a half or a quarter of bfloat16), or a smaller model"
    if resolved.model.dtype == "float32" and resolved.model.quantization is None and weight_bytes // 2 < total_bytes:
        fix = "Use --dtype bfloat16 (halves the weights), or a smaller model"
    each = ""
    if num_replicas > 1:
        each, fix = f" for each of {num_replicas} replicas", f"Lower --data-parallel-size. {fix}"
    return MemoryPlanError(
        f"The weights do not fit into memory: they take {shown_bytes(weight_bytes)} in "
        f"{resolved.model.quantization or resolved.model.dtype}, "
        f"and there are {shown_bytes(total_bytes)}{each}",
        fix=fix,
        param="model",
    )
