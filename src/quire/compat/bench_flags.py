"""Flags of vLLM's benchmarks that Quire's benchmarks lack, with the reason."""

from __future__ import annotations

_IMAGES = "prompts are text"
_HUB = "data sets are not downloaded; save it as a file and use --dataset-name custom"
_ONE_ENGINE = "only Quire's own engine is measured"
_PLOTS = "use --plot FILE.html, which has the timeline"

ABSENT_BENCH_FLAGS: dict[str, str] = {
    "--use-beam-search": "beams are measured by LLM.beam_search",
    "--lora-assignment": "all requests have the adapter of --lora-path",
    "--profile": "use py-spy on the engine process",
    "--random-batch-size": "embeddings are not in this version",
    "--no-reranker": "scores are not in this version",
    "--random-mm-base-items-per-request": _IMAGES,
    "--random-mm-num-mm-items-range-ratio": _IMAGES,
    "--random-mm-limit-mm-per-prompt": _IMAGES,
    "--random-mm-bucket-config": _IMAGES,
    "--enable-multimodal-chat": _IMAGES,
    "--custom-ensure-client-side-data": _IMAGES,
    "--asr-min-audio-len-sec": _IMAGES,
    "--asr-max-audio-len-sec": _IMAGES,
    "--hf-subset": _HUB,
    "--hf-split": _HUB,
    "--hf-name": _HUB,
    "--hf-output-len": _HUB,
    "--bfcl-categories": _HUB,
    "--blazedit-min-distance": _HUB,
    "--blazedit-max-distance": _HUB,
    "--speed-bench-dataset-subset": _HUB,
    "--speed-bench-output-len": _HUB,
    "--speed-bench-category": _HUB,
    "--spec-bench-output-len": _HUB,
    "--spec-bench-category": _HUB,
    "--plot-timeline": _PLOTS,
    "--plot-dataset-stats": _PLOTS,
    "--timeline-itl-thresholds": _PLOTS,
    "--backend": _ONE_ENGINE,
    "--async-engine": "measure AsyncLLM through `quire serve` and `quire bench serve`",
    "--hf-max-batch-size": _ONE_ENGINE,
    "--hf-enable-torch-compile": _ONE_ENGINE,
    "--probe-request-rate": "run a second `quire bench serve` beside the first",
    "--no-stream": "times of tokens need a stream",
    "--prequeue-requests": "all requests are in the engine before its first step",
    "--request-id-prefix": "the server names requests",
    "--chat-template-kwargs": "with --backend openai-chat use --extra-body.chat_template_kwargs.NAME VALUE",
    "--skip-tokenizer-init": "prompts are made and counted with the tokenizer",
    "--trust-remote-code": "code from a model repository is never run",
}
