"""GGUF files through every way in: the demo model as a file answers as transformers does with the file's weights."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import quire.demo
from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.errors import ConfigError
from quire.kernels import cpu
from tests.gguf.writing import write_gguf

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 24, "num_threads": 1}
MESSAGES = [
    [{"role": "user", "content": question}]
    for question in ("What does os.path.join do?", "Which module provides heapq.heappush?")
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
KINDS = ("F16", "Q8_0", "Q4_0")
EOS = 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """kind -> (file, what it holds)."""
    folder = tmp_path_factory.mktemp("gguf")
    written = {}
    for kind in KINDS:
        path = folder / f"demo-{kind}.gguf"
        written[kind] = (path, write_gguf(path, quire.demo.path("target"), kind))
    return written


@cache
def prompt_ids(index: int) -> list[int]:
    tokenizer = LLM(max_model_len=256, **OPTIONS).get_tokenizer()
    ids = tokenizer.apply_chat_template(MESSAGES[index], add_generation_prompt=True)
    assert isinstance(ids, list)
    return ids


@torch.inference_mode()
def are_greedy(answers: list[list[int]], held: dict[str, Tensor]) -> bool:
    """Whether transformers, with the file's weights, prefers each token behind those before it, and answers end so."""
    model = transformers.AutoModelForCausalLM.from_pretrained(quire.demo.path("target"), dtype=torch.float32).eval()
    model.load_state_dict(held | {"lm_head.weight": held["model.embed_tokens.weight"]})
    for index, answer in enumerate(answers):
        prompt = prompt_ids(index)
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        is_whole = len(answer) == GREEDY.max_tokens or answer[-1] == EOS
        if not is_whole or EOS in answer[:-1] or logits.argmax(-1).tolist() != answer:
            return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_weights_in_the_file(
    kind: str, files: dict[str, tuple[Path, dict[str, Tensor]]]
) -> None:
    path, held = files[kind]
    llm = LLM(model=str(path), dtype="float32", **OPTIONS)
    outputs = llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [prompt_ids(index) for index in range(len(MESSAGES))]
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    assert are_greedy(answers, held)
    assert [output.outputs[0].finish_reason == "stop" for output in outputs] == [EOS in answer for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_as_it_is_by_default(kind: str, files: dict[str, tuple[Path, dict[str, Tensor]]]) -> None:
    """Dtype by the file; the answer is still the demo model's."""
    llm = LLM(model=str(files[kind][0]), **OPTIONS)
    assert llm.resolved.model.dtype == ("float16" if kind == "F16" else "bfloat16")
    assert llm.resolved.model.quantization == "gguf"
    assert kind in llm.resolved.settings["quantization"].detail
    text = llm.chat(MESSAGES[0], GREEDY, use_tqdm=False)[0].outputs[0].text
    assert text.startswith("`os.path.join(")


def test_ways_to_name_a_file(files: dict[str, tuple[Path, dict[str, Tensor]]]) -> None:
    path = files["Q4_0"][0]
    ways: list[dict[str, Any]] = [
        {"model": f"{path.parent}:q4_0"},
        {"gguf_file": str(path)},
        {"model": str(path.parent), "gguf_file": path.name, "quantization": "gguf", "load_format": "gguf"},
        {"model": str(path), "tokenizer": str(quire.demo.path("target"))},
        {"model": str(path), "tokenizer": str(path)},
    ]
    texts = {LLM(**way, **OPTIONS).chat(MESSAGES[0], GREEDY, use_tqdm=False)[0].outputs[0].text for way in ways}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantization": "int8"}, "leave --quantization out"),
        ({"quantization": "awq"}, "leave --quantization out"),
        ({"load_format": "safetensors"}, "in a GGUF file"),
        ({"load_format": "dummy"}, "Dummy weights are not made"),
    ],
)
def test_contradictions(
    arguments: dict[str, Any], message: str, files: dict[str, tuple[Path, dict[str, Tensor]]]
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model=str(files["Q8_0"][0]), **arguments, **OPTIONS)


def test_quantization_gguf_of_another_checkpoint() -> None:
    with pytest.raises(ConfigError, match="leave --quantization out"):
        LLM(quantization="gguf", **OPTIONS)


@pytest.mark.skipif(not cpu.available(), reason="the twin holds 4-bit codes in bytes")
@pytest.mark.parametrize("kind", KINDS)
def test_explain_plans_the_bytes_that_are_held(
    kind: str, files: dict[str, tuple[Path, dict[str, Tensor]]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = files[kind][0]
    assert main(["explain", str(path), "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    llm = LLM(model=str(path), **OPTIONS)
    assert explained["model"]["weight_bytes"] == llm.resolved.memory.weight_bytes
    assert explained["model"]["architecture"] == "LlamaForCausalLM"
    assert explained["settings"]["quantization"]["value"] == "gguf"
