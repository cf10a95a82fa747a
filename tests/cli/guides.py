"""The command lines of the five guides, as a reader pastes them: comments, prompts and all.

Verbatim, from the stored pages: S0-3, S0-4, S0-6, S0-7 (devopsboys.com, 2026-06-04), S1-3, S1-4, S1-6, S1-7, S1-8
(gigagpu.com), S2-3 (truetech.dev, whose comments are in Russian), all of S3 (runlocalai.co, where a command is one line
with its backslashes) and all of S4 (devfloor9's engineering playbook, 2026-04-06). The stored pages of S0, S1 and S2
break off after 2,000 characters: the further lines are rebuilt from the rows, which name every flag and value, and
REBUILT lists them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """A command of a guide.

    Attributes:
        row: of the list of claims.
        statuses: of the flags that are not the same in Quire, where the model is not on this machine.
        settings: the values from the flags, if Quire starts with them.
        says: a part of the answer to the first flag in `statuses`.
        command: the command for Quire that `explain --vllm` shows, without `quire serve`.
    """

    row: str
    text: str
    statuses: dict[str, str] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    says: str = ""
    command: str = ""


REBUILT = {
    "S0-11", "S0-14", "S0-16", "S0-18", "S1-9", "S1-11", "S1-12", "S1-15", "S2-7", "S2-9", "S2-11", "S2-14",
    "S2-15",
}  # fmt: skip

S0_3 = r"""python -m vllm.entrypoints.openai.api_server \
  --model mistralai/Mistral-7B-Instruct-v0.3 \
  --gpu-memory-utilization 0.90 \    # % of GPU VRAM for model + KV cache
  --max-model-len 8192 \             # Max sequence length
  --max-num-batched-tokens 8192 \    # Tokens processed per iteration
  --max-num-seqs 256 \               # Max concurrent sequences
  --tensor-parallel-size 1 \         # GPUs for tensor parallelism
  --dtype float16 \                  # Precision
  --quantization awq                 # Quantization method
"""

S1_4 = r"""# Benchmark with concurrent requests
python -m vllm.benchmarks.benchmark_serving \
--backend openai \
--model meta-llama/Meta-Llama-3.1-8B-Instruct \
--num-prompts 100 \
--request-rate 10
"""

# Commands that start no server: row, text, and a part of what `explain --vllm` says.
OTHERS = (
    ("S1-3", "# Install the benchmark tool\npip install vllm\n", "Got 'pip'"),
    ("S1-4", S1_4, "Use python -m quire.benchmarks.benchmark_serving"),
    ("S1-6", "watch -n 1 nvidia-smi", "Got 'watch'"),
    (
        "S3-7",
        "ab -n 1000 -c 32 -p requests.json -T application/json \\ http://localhost:8000/v1/chat/completions",
        "Got 'ab'",
    ),
    (
        "S3-8",
        "curl -s http://localhost:8000/metrics | grep vllm:num_generate_tokens_total\n"
        "# Expected: an increasing counter confirming tokens are being generated continuously\n",
        "Got 'curl'",
    ),
)

LINES: tuple[Line, ...] = (
    Line(
        "S0-3",
        S0_3,
        settings={
            "model": "mistralai/Mistral-7B-Instruct-v0.3",
            "gpu_memory_utilization": 0.9,
            "max_model_len": 8192,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 256,
            "tensor_parallel_size": 1,
            "dtype": "float16",
            "quantization": "awq",
        },
        command=(
            "mistralai/Mistral-7B-Instruct-v0.3 --gpu-memory-utilization 0.9 --max-model-len 8192 "
            "--max-num-batched-tokens 8192 --max-num-seqs 256 --tensor-parallel-size 1 "
            "--dtype float16 --quantization awq"
        ),
    ),
    Line(
        "S0-4",
        """# Default: 0.90 (90% of VRAM)
--gpu-memory-utilization 0.95   # More KV cache = more concurrent requests
""",
        settings={"gpu_memory_utilization": 0.95},
        command="--gpu-memory-utilization 0.95",
    ),
    Line(
        "S0-4",
        """# Lower if you see CUDA OOM:
--gpu-memory-utilization 0.85
""",
        settings={"gpu_memory_utilization": 0.85},
        command="--gpu-memory-utilization 0.85",
    ),
    Line(
        "S0-6",
        r"""# AWQ (recommended for most cases)
--quantization awq \
--model TheBloke/Mistral-7B-Instruct-v0.2-AWQ
""",
        settings={"quantization": "awq", "model": "TheBloke/Mistral-7B-Instruct-v0.2-AWQ"},
        command="TheBloke/Mistral-7B-Instruct-v0.2-AWQ --quantization awq",
    ),
    Line(
        "S0-6",
        r"""# GPTQ
--quantization gptq \
--model TheBloke/Mistral-7B-Instruct-v0.2-GPTQ
""",
        settings={"quantization": "gptq"},
        command="TheBloke/Mistral-7B-Instruct-v0.2-GPTQ --quantization gptq",
    ),
    Line(
        "S0-7",
        r"""# FP8 (requires H100/A100 with compute capability 9.0+)
--quantization fp8 \
--dtype float16
""",
        settings={"quantization": "fp8", "dtype": "float16"},
        command="--quantization fp8 --dtype float16",
    ),
    Line(
        "S0-11",
        "--max-num-batched-tokens 16384 \\\n--max-num-seqs 512",
        settings={"max_num_batched_tokens": 16384, "max_num_seqs": 512},
        command="--max-num-batched-tokens 16384 --max-num-seqs 512",
    ),
    Line(
        "S0-14",
        r"""python -m vllm.entrypoints.openai.api_server \
  --model meta-llama/Meta-Llama-3-70B-Instruct \
  --tensor-parallel-size 2 \
  --dtype float16
""",
        settings={"tensor_parallel_size": 2},
        command="meta-llama/Meta-Llama-3-70B-Instruct --tensor-parallel-size 2 --dtype float16",
    ),
    Line(
        "S0-16",
        r"""python -m vllm.entrypoints.openai.api_server \
  --model meta-llama/Meta-Llama-3-8B-Instruct \
  --speculative-model meta-llama/Meta-Llama-3-1B \
  --num-speculative-tokens 5
""",
        {"--speculative-model": "translated", "--num-speculative-tokens": "translated"},
        says="speculation has one setting",
        command=(
            "meta-llama/Meta-Llama-3-8B-Instruct "
            '--speculative-config \'{"model": "meta-llama/Meta-Llama-3-1B", "num_speculative_tokens": 5}\''
        ),
    ),
    Line(
        "S0-18",
        r"""python -m vllm.entrypoints.openai.api_server \
  --model TheBloke/Mistral-7B-Instruct-v0.2-AWQ \
  --quantization awq \
  --dtype float16 \
  --gpu-memory-utilization 0.92 \
  --max-model-len 8192 \
  --max-num-batched-tokens 16384 \
  --max-num-seqs 256 \
  --served-model-name mistral-7b \
  --host 0.0.0.0 \
  --port 8000 \
  --uvicorn-log-level warning
""",
        {"--host": "contradictory"},
        says="open to everybody who reaches this machine. Got '0.0.0.0'",
        command=(
            "TheBloke/Mistral-7B-Instruct-v0.2-AWQ --quantization awq --dtype float16 "
            "--gpu-memory-utilization 0.92 --max-model-len 8192 --max-num-batched-tokens 16384 "
            "--max-num-seqs 256 --served-model-name mistral-7b --port 8000 "
            "--uvicorn-log-level warning"
        ),
    ),
    Line(
        "S1-3",
        r"""# Install the benchmark tool
pip install vllm
# Run the benchmark
python -m vllm.entrypoints.openai.api_server \
--model meta-llama/Meta-Llama-3.1-8B-Instruct &
""",
        settings={"model": "meta-llama/Meta-Llama-3.1-8B-Instruct"},
        command="meta-llama/Meta-Llama-3.1-8B-Instruct",
    ),
    Line(
        "S1-7",
        "--gpu-memory-utilization 0.95 \\\n--max-model-len 4096\n",
        settings={"gpu_memory_utilization": 0.95, "max_model_len": 4096},
        command="--gpu-memory-utilization 0.95 --max-model-len 4096",
    ),
    Line(
        "S1-8",
        "--enable-prefix-caching",
        settings={"enable_prefix_caching": True},
        command="--enable-prefix-caching",
    ),
    Line(
        "S1-9",
        "--max-num-seqs 256 \\\n--max-num-batched-tokens 32768",
        settings={"max_num_seqs": 256, "max_num_batched_tokens": 32768},
        command="--max-num-seqs 256 --max-num-batched-tokens 32768",
    ),
    Line(
        "S1-11",
        r"""python -m vllm.entrypoints.openai.api_server \
  --model meta-llama/Meta-Llama-3.1-8B-Instruct-AWQ \
  --quantization awq \
  --dtype half
""",
        settings={"quantization": "awq", "dtype": "half"},
        command="meta-llama/Meta-Llama-3.1-8B-Instruct-AWQ --quantization awq --dtype half",
    ),
    Line(
        "S1-12",
        "--tensor-parallel-size 2",
        settings={"tensor_parallel_size": 2},
        command="--tensor-parallel-size 2",
    ),
    Line(
        "S1-15",
        r"""python -m vllm.entrypoints.openai.api_server \
  --model meta-llama/Meta-Llama-3.1-8B-Instruct \
  --gpu-memory-utilization 0.95 \
  --max-model-len 4096 \
  --max-num-seqs 256 \
  --enable-prefix-caching \
  --dtype half \
  --port 8000
""",
        settings={"dtype": "half", "max_num_seqs": 256, "port": 8000},
        command=(
            "meta-llama/Meta-Llama-3.1-8B-Instruct --gpu-memory-utilization 0.95 --max-model-len 4096 "
            "--max-num-seqs 256 --enable-prefix-caching --dtype half --port 8000"
        ),
    ),
    Line(
        "S2-3",
        r"""# Установка
pip install vllm
# Запуск сервера (OpenAI-совместимый API)
python -m vllm.entrypoints.openai.api_server \
--model mistralai/Mistral-7B-Instruct-v0.3 \
--tensor-parallel-size 1 \ # для одной GPU
--max-model-len 8192 \
--max-num-seqs 256 \ # максимальный concurrent batch
--gpu-memory-utilization 0.90 \ # 90% VRAM для модели
--host 0.0.0.0 \
--port 8000
""",
        {"--host": "contradictory"},
        says="Set --api-key, --api-key-file or VLLM_API_KEY",
        command=(
            "mistralai/Mistral-7B-Instruct-v0.3 --tensor-parallel-size 1 --max-model-len 8192 "
            "--max-num-seqs 256 --gpu-memory-utilization 0.9 --port 8000"
        ),
    ),
    Line(
        "S2-7",
        r"""python -m vllm.entrypoints.openai.api_server \
--model meta-llama/Llama-3-70b \
--tensor-parallel-size 4 \
--dtype bfloat16 \
--max-model-len 16384 \
--gpu-memory-utilization 0.95
""",
        settings={"tensor_parallel_size": 4},
        command=(
            "meta-llama/Llama-3-70b --tensor-parallel-size 4 --dtype bfloat16 --max-model-len 16384 "
            "--gpu-memory-utilization 0.95"
        ),
    ),
    Line(
        "S2-9",
        r"""python -m vllm.entrypoints.openai.api_server \
--model TheBloke/Mistral-7B-Instruct-v0.3-AWQ \
--quantization awq
""",
        settings={"quantization": "awq"},
        command="TheBloke/Mistral-7B-Instruct-v0.3-AWQ --quantization awq",
    ),
    Line(
        "S2-9",
        r"""python -m vllm.entrypoints.openai.api_server \
--model TheBloke/Llama-2-13B-GPTQ \
--quantization gptq
""",
        settings={"quantization": "gptq"},
        command="TheBloke/Llama-2-13B-GPTQ --quantization gptq",
    ),
    Line(
        "S2-9",
        r"""python -m vllm.entrypoints.openai.api_server \
--model meta-llama/Llama-3-8b \
--quantization fp8 \
--dtype auto
""",
        settings={"quantization": "fp8", "dtype": "auto"},
        command="meta-llama/Llama-3-8b --quantization fp8 --dtype auto",
    ),
    Line(
        "S2-11",
        r"""python -m vllm.entrypoints.openai.api_server \
--model meta-llama/Llama-3-70b \
--speculative-model meta-llama/Llama-3-8b \
--num-speculative-tokens 5 \
--tensor-parallel-size 4
""",
        {
            "--speculative-model": "translated",
            "--num-speculative-tokens": "translated",
        },
        says="speculation has one setting",
        command=(
            "meta-llama/Llama-3-70b --tensor-parallel-size 4 "
            '--speculative-config \'{"model": "meta-llama/Llama-3-8b", "num_speculative_tokens": 5}\''
        ),
    ),
    Line(
        "S2-14",
        "--max-num-seqs 512 --max-num-batched-tokens 32768 --block-size 32 --swap-space 4",
        {"--swap-space": "no effect"},
        {"block_size": 32, "max_num_seqs": 512},
        "preempted requests are computed again; nothing is swapped, and nothing to set; vLLM 0.32 no longer has it",
        command="--max-num-seqs 512 --max-num-batched-tokens 32768 --block-size 32",
    ),
    Line(
        "S2-15",
        "--max-num-seqs 32 --max-num-batched-tokens 4096",
        settings={"max_num_seqs": 32},
        command="--max-num-seqs 32 --max-num-batched-tokens 4096",
    ),
    Line(
        "S3-1",
        "vllm serve <model> \\ --max-num-batched-tokens 8192 \\ --gpu-memory-utilization 0.85",
        settings={"model": "<model>", "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.85},
        command="'<model>' --max-num-batched-tokens 8192 --gpu-memory-utilization 0.85",
    ),
    Line(
        "S3-2",
        "vllm serve <model> \\ --enable-chunked-prefill \\ --max-num-batched-tokens 4096",
        settings={"enable_chunked_prefill": True, "enable_prefix_caching": True},
        command="'<model>' --enable-chunked-prefill --max-num-batched-tokens 4096",
    ),
    Line(
        "S3-4",
        "vllm serve <model> \\ --tensor-parallel-size 2 \\ --num-speculative-decoder-samples 4",
        {"--num-speculative-decoder-samples": "never existed"},
        says="no version of vLLM had it",
        command="'<model>' --tensor-parallel-size 2",
    ),
    Line(
        "S3-5",
        "--num-speculative-decoder-samples 0",
        {"--num-speculative-decoder-samples": "no effect"},
        says="no version of vLLM had it",
        command="",
    ),
    Line(
        "S3-6",
        "vllm serve <model> \\ --block-size 32 \\ --gpu-memory-utilization 0.88",
        settings={"block_size": 32},
        command="'<model>' --block-size 32 --gpu-memory-utilization 0.88",
    ),
    Line(
        "S4-13",
        r"""# 4 GPUs tensor parallel, 2 nodes pipeline parallel
vllm serve meta-llama/Llama-3.3-70B-Instruct \
  --tensor-parallel-size 4 \
  --pipeline-parallel-size 2
""",
        settings={"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
        command="meta-llama/Llama-3.3-70B-Instruct --tensor-parallel-size 4 --pipeline-parallel-size 2",
    ),
    Line(
        "S4-18",
        "vllm serve model-name --enable-expert-parallel",
        settings={"model": "model-name", "enable_expert_parallel": True},
        command="model-name --enable-expert-parallel",
    ),
    Line(
        "S4-24",
        r"""vllm serve meta-llama/Llama-3.3-70B-Instruct \
  --enable-lora \
  --lora-modules customer-support=./lora-cs finance=./lora-fin \
  --max-loras 4 \
  --max-lora-rank 64
""",
        settings={
            "enable_lora": True,
            "lora_modules": ("customer-support=./lora-cs", "finance=./lora-fin"),
            "max_loras": 4,
            "max_lora_rank": 64,
        },
        command=(
            "meta-llama/Llama-3.3-70B-Instruct --enable-lora "
            "--lora-modules customer-support=./lora-cs finance=./lora-fin --max-loras 4 "
            "--max-lora-rank 64"
        ),
    ),
    Line(
        "S4-23",
        "--lora-extra-vocab-size 256",
        {"--lora-extra-vocab-size": "no effect"},
        says="a vocabulary never grows here; vLLM 0.32 no longer has it",
        command="",
    ),
    Line(
        "S4-26",
        "# FP8 quantization (recommended)\nvllm serve Qwen/Qwen3-32B-FP8 --quantization fp8\n",
        settings={"quantization": "fp8"},
        command="Qwen/Qwen3-32B-FP8 --quantization fp8",
    ),
    Line(
        "S4-25",
        "# AWQ quantization\nvllm serve TheBloke/Llama-2-70B-AWQ --quantization awq\n",
        settings={"quantization": "awq"},
        command="TheBloke/Llama-2-70B-AWQ --quantization awq",
    ),
    Line(
        "S4-27",
        r"""# GGUF quantization (vLLM v0.6+)
vllm serve --model TheBloke/Llama-2-70B-GGUF \
  --quantization gguf \
  --gguf-file llama-2-70b.Q4_K_M.gguf
""",
        settings={"quantization": "gguf", "gguf_file": "llama-2-70b.Q4_K_M.gguf"},
        command="TheBloke/Llama-2-70B-GGUF --quantization gguf --gguf-file llama-2-70b.Q4_K_M.gguf",
    ),
    Line(
        "S4-28",
        "vllm serve model-name --enable-prefix-caching",
        settings={"enable_prefix_caching": True},
        command="model-name --enable-prefix-caching",
    ),
    Line(
        "S4-30",
        "vllm serve model-name --enforce-eager  # Disable CUDA Graph (for debugging)",
        settings={"enforce_eager": True},
        command="model-name --enforce-eager",
    ),
    Line(
        "S4-31",
        "VLLM_USE_DEEP_GEMM=1 vllm serve model-name --kv-cache-dtype=fp8",
        {"VLLM_USE_DEEP_GEMM": "no effect"},
        {"kv_cache_dtype": "fp8"},
        "it is about block-FP8 weights on GPUs, and never about the KV cache's dtype",
        command="model-name --kv-cache-dtype fp8",
    ),
)
