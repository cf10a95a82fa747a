"""Flags of vLLM's benchmarks that are not flags here, with the reason."""

from __future__ import annotations

_IMAGES = "prompts are text"
_ADAPTERS = "adapters are not in this version"
_HUB = "data sets are not downloaded; save it as a file and use --dataset-name custom"
_PLOTS = "use --plot FILE.html, which has the timeline"

ABSENT_BENCH_FLAGS: dict[str, str] = {
    "--use-beam-search": "beams are measured by LLM.beam_search",
    "--profile": "use py-spy on the engine process",
    "--lora-modules": _ADAPTERS,
    "--lora-assignment": _ADAPTERS,
    "--lora-path": _ADAPTERS,
    "--random-batch-size": "embeddings are not in this version",
    "--no-reranker": "scores are not in this version",
    "--random-mm-base-items-per-request": _IMAGES,
    "--random-mm-num-mm-items-range-ratio": _IMAGES,
    "--random-mm-limit-mm-per-prompt": _IMAGES,
    "--random-mm-bucket-config": _IMAGES,
    "--enable-multimodal-chat": _IMAGES,
    "--hf-subset": _HUB,
    "--hf-split": _HUB,
    "--hf-name": _HUB,
    "--hf-output-len": _HUB,
    "--spec-bench-output-len": _HUB,
    "--spec-bench-category": _HUB,
    "--plot-timeline": _PLOTS,
    "--plot-dataset-stats": _PLOTS,
    "--timeline-itl-thresholds": _PLOTS,
    "--async-engine": "measure AsyncLLM through `quire serve` and `quire bench serve`",
    "--hf-max-batch-size": "only Quire's own engine is measured",
    "--hf-enable-torch-compile": "only Quire's own engine is measured",
    "--probe-request-rate": "run a second `quire bench serve` beside the first",
    "--no-stream": "times of tokens need a stream",
}
