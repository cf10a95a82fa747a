"""Trains an EAGLE-3 head (arXiv 2503.01840) that drafts for the demo model: `quire.demo.train --size eagle3`.

The target's tokens are known everywhere, so all positions learn at once. The head is run up to DEPTH times. It first
runs on hidden states of the target, then on its own hidden states of the run before, one position further, as in
drafting.

Dimensions: N rows, T positions, D hidden, H heads, E head dim.
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

STREAMS = (2, 4, 6)  # the residual streams that it reads: before these layers; the model has 6
HEADS, HEAD_DIM, INNER = 2, 32, 64
DEPTH = 2  # drafts in a row that it learns
DECAY = 0.5  # the weight of each further token is this share of the one before it
REUSES, MOST_LESSONS = 4, 48
WARMUP_STEPS, REPORT_STEPS = 40, 40
ROPE_THETA, EPS = 10_000.0, 1e-5


class Head(nn.Module):
    """The head of models/head.py for training. Its parameters have the names of checkpoints.

    Args:
        width: the number of hidden elements of the target.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = HEADS * HEAD_DIM
        linears = {
            "fc": (len(STREAMS) * width, width),
            "midlayer.self_attn.q_proj": (2 * width, inner),
            "midlayer.self_attn.k_proj": (2 * width, HEAD_DIM),
            "midlayer.self_attn.v_proj": (2 * width, HEAD_DIM),
            "midlayer.self_attn.o_proj": (inner, width),
            "midlayer.mlp.gate_proj": (width, INNER),
            "midlayer.mlp.up_proj": (width, INNER),
            "midlayer.mlp.down_proj": (INNER, width),
        }
        norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
        self.weights = {
            **{name: nn.Parameter(torch.randn(out, size) * size**-0.5) for name, (size, out) in linears.items()},
            **{name: nn.Parameter(torch.ones(width)) for name in norms},
        }
        for name, weight in self.weights.items():
            self.register_parameter(name.replace(".", "_"), weight)

    def hidden_of(self, streams: Tensor) -> Tensor:
        """The hidden states of all streams side by side."""
        return self._linear("fc", streams)

    def run(
        self, embeddings: Tensor, hidden: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run once: hidden states [N, T, D] for the next positions, and the same after the norm for the logits.

        Args:
            embeddings, hidden: [N, T, D].
            keys, values: a tensor of each earlier run. This run appends its own.
        """
        x = torch.cat(
            [self._norm("midlayer.input_layernorm", embeddings), self._norm("midlayer.hidden_norm", hidden)], -1
        )
        hidden = hidden + self._linear("midlayer.self_attn.o_proj", self._attend(x, keys, values))
        x = self._norm("midlayer.post_attention_layernorm", hidden)
        inner = F.silu(self._linear("midlayer.mlp.gate_proj", x)) * self._linear("midlayer.mlp.up_proj", x)
        hidden = hidden + self._linear("midlayer.mlp.down_proj", inner)
        return hidden, self._norm("norm", hidden)

    def _attend(self, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """The result of attention.

        Position i of run s sees itself, s - 1 positions of the runs between, and the earlier positions of the first
        run.
        """
        num_rows, length, _ = x.shape
        queries = _rotated(self._linear("midlayer.self_attn.q_proj", x).view(num_rows, length, HEADS, HEAD_DIM))
        keys.append(_rotated(self._linear("midlayer.self_attn.k_proj", x)[:, :, None])[:, :, 0])
        values.append(self._linear("midlayer.self_attn.v_proj", x))
        run, scale = len(keys) - 1, HEAD_DIM**-0.5
        places = torch.arange(length)
        scores = torch.einsum("nihe,nje->nhij", queries, keys[0]) * scale
        scores = scores.masked_fill(places[None, :] > places[:, None] - run, -torch.inf)
        own = [torch.einsum("nihe,nie->nhi", queries, _moved(keys[t], run - t)) * scale for t in range(1, run + 1)]
        shares = torch.cat([scores, *(each[..., None] for each in own)], -1).softmax(-1)
        found = torch.einsum("nhij,nje->nihe", shares[..., :length], values[0])
        for t in range(1, run + 1):
            share = shares[..., length + t - 1].transpose(1, 2)[..., None]
            found = found + share * _moved(values[t], run - t)[:, :, None]
        return found.flatten(2)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[name])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights[name], EPS)

    def save(self, folder: Path, target: Any) -> None:
        """Write a checkpoint in bfloat16, in the form of EAGLE's authors."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"{name}.weight": weight.detach().to(torch.bfloat16) for name, weight in self.weights.items()}
        safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_size": target.config.hidden_size,
            "intermediate_size": INNER,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 1,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": target.config.max_position_embeddings,
            "rms_norm_eps": EPS,
            "rope_theta": ROPE_THETA,
            "vocab_size": target.config.vocab_size,
            "draft_vocab_size": target.config.vocab_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(STREAMS), "use_aux_hidden_state": True},
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _moved(x: Tensor, count: int) -> Tensor:
    """The same tensor, in which each position has the value of the position `count` before it."""
    return x if count == 0 else F.pad(x, (0, 0, count, 0))[:, : x.shape[1]]


def _rotated(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1])[:, None] / ROPE_THETA ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@torch.no_grad()
def observe(target: Any, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The streams of the target side by side, and its most likely token after each position."""
    streams: list[Tensor] = []
    modules = [*target.model.layers, target.model.norm]
    hooks = [modules[at].register_forward_pre_hook(lambda _, args: streams.append(args[0])) for at in STREAMS]
    try:
        likeliest = target(input_ids=token_ids, use_cache=False).logits.argmax(-1)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(streams, -1), likeliest


def drafted(head: Head, target: Any, token_ids: Tensor, streams: Tensor, depth: int = DEPTH) -> Iterator[Tensor]:
    """For each run, the normed hidden states for the logits of the second, third, ... token after each position."""
    hidden, keys, values = head.hidden_of(streams), list[Tensor](), list[Tensor]()
    embeddings = F.embedding(F.pad(token_ids[:, 1:], (0, 1)), target.get_input_embeddings().weight).float()
    for _ in range(depth):
        hidden, normed = head.run(embeddings, hidden, keys, values)
        yield normed
        hidden = _moved(hidden, 1)


@dataclass(frozen=True)
class Lesson:
    """A batch, and the target's results for it.

    Attributes:
        streams, likeliest: see observe.
        is_answer: see answers.
    """

    token_ids: Tensor
    streams: Tensor
    likeliest: Tensor
    is_answer: Tensor


def losses(head: Head, target: Any, lesson: Lesson, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each run, the cross entropy of the target's most likely tokens in answers, and the share of right drafts."""
    for run, normed in enumerate(drafted(head, target, lesson.token_ids, lesson.streams.float(), depth)):
        # Position i has read the token after it, and predicts the target's token there.
        is_meant = lesson.is_answer[:, run + 1 :]
        logits = F.linear(normed[:, run:-1][is_meant].bfloat16(), target.get_input_embeddings().weight)
        wanted = lesson.likeliest[:, run + 1 :][is_meant]
        yield F.cross_entropy(logits, wanted), (logits.argmax(-1) == wanted).float().mean()


def answers(token_ids: Tensor, start: int, assistant: int, end: int) -> Tensor:
    """Whether the token after each token belongs to an answer.

    Args:
        start, assistant, end: the tokens that begin a turn, name the assistant, and end a turn.
    """
    places = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    begins = F.pad((token_ids[:, :-1] == start) & (token_ids[:, 1:] == assistant), (2, 0))[:, :-1]
    last_begin = torch.where(begins, places, -1).cummax(1).values
    last_end = torch.where(token_ids == end, places, -1).cummax(1).values
    return last_begin > last_end


def train_head(
    target: Any,
    batches: Iterator[Tensor],
    marks: tuple[int, int, int],
    rng: random.Random,
    num_steps: int,
    learning_rate: float,
) -> Head:
    """Train with AdamW at a falling rate.

    The target needs as long for a batch as a step takes, so each batch is used REUSES times.

    Args:
        target: the demo model. Its weights become bfloat16.
        marks: the last three arguments of `answers`.
    """
    target.requires_grad_(False).bfloat16().eval()
    head = Head(target.config.hidden_size)
    print(f"{sum(p.numel() for p in head.parameters()) / 1e3:.0f} thousand parameters", flush=True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    lessons: deque[Lesson] = deque(maxlen=MOST_LESSONS)
    started = time.perf_counter()
    for step in range(num_steps):
        if is_new := step % REUSES == 0:
            token_ids = next(batches)
            streams, likeliest = observe(target, token_ids)
            lessons.append(Lesson(token_ids, streams, likeliest, answers(token_ids, *marks)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - step / num_steps)
        lesson = lessons[-1] if is_new else rng.choice(lessons)
        found = list(losses(head, target, lesson, depth=1 + step % DEPTH))
        loss = torch.stack([loss * DECAY**run for run, (loss, _) in enumerate(found)]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % REPORT_STEPS == 0:  # of a new lesson
            per_step = (time.perf_counter() - started) / (step + 1)
            print(f"step {step}  loss {loss.item():.3f}  right {found[0][1]:.3f}  {per_step:.2f} s/step", flush=True)
    return head


@torch.inference_mode()
def acceptance(head: Head, target: Any, prompts: Iterable[list[int]]) -> list[float]:
    """The share of first, second, ... drafts that are the target's most likely tokens, in its greedy answers."""
    right, count = torch.zeros(DEPTH), 0
    for prompt in prompts:
        output = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=150,
            do_sample=False,
        )
        length = output.shape[1] - len(prompt)
        streams, likeliest = observe(target, output)
        for run, normed in enumerate(drafted(head, target, output, streams.float())):
            drafts = F.linear(normed[0, run:-1].bfloat16(), target.get_input_embeddings().weight).argmax(-1)
            right[run] += (drafts == likeliest[0, run + 1 :])[-length:-1].sum()
        count += length - 1
    return (right / count).tolist()
