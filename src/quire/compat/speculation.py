"""The keys and methods of vLLM's --speculative-config: their meaning here, or the reason why they are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.compat.foreign import Foreign, accepted, refused
from quire.compat.names import nearest
from quire.compat.table import settle
from quire.compat.values import SAME_VALUES, why_not
from quire.errors import ConfigError
from quire.hf_config.drafter import method_of_checkpoint
from quire.hf_config.json_file import read_object
from quire.logs import get_logger
from quire.speculative_config import FIELDS, METHODS, MOST_DRAFTS, SpeculativeConfig, SpeculativeMethod, keys_of

logger = get_logger(__name__)

_DSPARK = "it belongs to DSpark, which is not in this version"
_BY_VLLM = "vLLM fills it in itself"
_TYPICAL = "it belongs to typical acceptance, which is refused: it changes the tokens"

# Keys of vLLM's SpeculativeConfig, from 0.5 to 0.32, that our SpeculativeConfig lacks.
SPECULATION_KEYS: dict[str, Foreign] = {
    entry.name: entry
    for entry in (
        *accepted("--enforce-eager holds for the drafter too", switches="enforce_eager"),
        *accepted("kernels are chosen for the device at start", values="moe_backend attention_backend", off=("auto",)),
        *accepted("no code from a model repository is ever loaded", values="code_revision"),
        *accepted("no model with sparse attention is in this version", switches="index_share_for_mtp_iteration"),
        *accepted("drafts are never padded", switches="disable_padded_drafter_batch"),
        *accepted("prefix hits always keep their last block", switches="disable_eagle_block_drop", off=(True, False)),
        *accepted("the first rank draws drafts from the logits of all ranks", switches="use_local_argmax_reduction"),
        *accepted(
            "depth follows what held and what steps cost for every method: see adaptive",
            switches="enable_adaptive_verification adaptive_verification",
        ),
        *accepted("drafts are verified in the one way there is", switches="disable_mqa_scorer"),
        *accepted("logprobs always come from the model", switches="disable_logprobs", off=(True, False)),
        *accepted("--disable-log-stats holds for drafts too", switches="disable_log_stats", off=(True, False)),
        *accepted("steps are as --enable-chunked-prefill says", switches="enable_chunked_prefill", off=(True, False)),
        *refused(
            "drafts are tokens of the model's own vocabulary",
            "Use a drafter with the same tokenizer",
            switches="use_heterogeneous_vocab",
        ),
        *refused(
            "drafts are made one after the other: a drafter that makes them at once (PARD, P-EAGLE) is not in this "
            "version",
            switches="parallel_drafting",
        ),
        *refused(_DSPARK, values="dspark_draft_topk"),
        *refused("drafts are chains, not trees", "Use num_speculative_tokens", values="speculative_token_tree"),
        *refused("vLLM refuses it too", "Use draft_tensor_parallel_size", values="tensor_parallel_size", off=(1,)),
        *refused(
            _BY_VLLM,
            values="target_model_config target_parallel_config draft_model_config draft_parallel_config",
        ),
        *refused(
            "a draft is accepted only if the model samples it, so that no token changes",
            "Leave it out",
            values="acceptance_method",
            off=("rejection_sampler",),
        ),
        *accepted(_TYPICAL, values="posterior_threshold posterior_alpha"),
        *refused("synthetic_acceptance_rates has a share per position", values="synthetic_acceptance_rate"),
    )
}
# vLLM's keys that become other keys.
OTHER_SPELLINGS = {
    "disable_by_batch_size": "num_speculative_tokens_per_batch_size",
    "synthetic_acceptance_length": "synthetic_acceptance_rates",
}
_NO_MODEL = ("ngram", "[ngram]", "ngram_gpu", "suffix")  # vLLM's placeholders where no model drafts
_MANY = 1 << 20  # more requests than any server runs


def speculative_config_of(given: Mapping[str, Any]) -> SpeculativeConfig:
    """The config for a JSON object. A notice names keys without effect.

    Raises ConfigError: a key or a method is unknown or refused, or a value is illegal.
    """
    try:
        keys = settle(
            {str(key): value for key, value in given.items()}, "speculative_config.{}".format, SPECULATION_KEYS
        )
        keys = {key: value for key, value in keys.items() if value is not None}
        for key in keys:
            if key not in (*FIELDS, *OTHER_SPELLINGS):
                raise _unknown("key", key, (*FIELDS, *OTHER_SPELLINGS, *SPECULATION_KEYS))
        method = _method(keys)
        keys |= {"method": method, **_lists(keys)}
        if method == "ngram":
            keys |= _lookup(keys)
        elif method == "suffix":
            depth = keys.get("suffix_decoding_max_tree_depth", 24)
            keys.setdefault("num_speculative_tokens", min(depth, MOST_DRAFTS) if isinstance(depth, int) else depth)
        _translate(keys)
        config = SpeculativeConfig(**keys)
    except ConfigError as error:
        error.param = "speculative_config"
        raise
    for key in keys.keys() - set(keys_of(method)):
        logger.warning("speculative_config.%s has no effect: speculation by %s does not read it", key, method)
    if config.rejection_sample_method == "synthetic":
        logger.warning("Drafts are accepted at random (synthetic): the tokens are WRONG. Use this only for benchmarks")
    return config


def _method(keys: dict[str, Any]) -> SpeculativeMethod:
    """The method, which may be inferred from the model. Placeholders for a model are removed."""
    model, method = keys.get("model"), keys.get("method")
    if isinstance(model, os.PathLike):
        model = keys["model"] = os.fspath(model)
    if model in _NO_MODEL:
        del keys["model"]
        method = method or SAME_VALUES["spec_method"].get(model, model)
        model = None
    inferred_from = ""
    if method is None:
        if not isinstance(model, str):
            raise ConfigError(
                "speculative_config does not say how to draft",
                expected=f"a method: {', '.join(METHODS)}; or a model that drafts",
                fix="Name one with --spec-method or --spec-model",
            )
        method, inferred_from = _of_checkpoint(model), model
    elif not isinstance(method, str):
        raise ConfigError("Illegal method in speculative_config", value=method, expected=f"one of {', '.join(METHODS)}")
    elif method == "eagle" and isinstance(model, str) and _of_checkpoint(model) == "eagle3":
        method = "eagle3"
    method = SAME_VALUES["spec_method"].get(method, method)
    if (why := why_not("spec_method", method)) is not None:
        raise ConfigError(
            f"Speculation by {method} is not supported: {why.text}", value=inferred_from or None, fix=why.instead
        )
    if method not in METHODS:
        raise _unknown("method", method, METHODS)
    return method


def _of_checkpoint(model: str) -> str:
    """The method of a checkpoint: by its config.json if it is a folder on this machine, or else by its name."""
    file = Path(model).expanduser() / "config.json"
    return method_of_checkpoint(model, read_object(file, required=False) if file.is_file() else None)


def _unknown(what: str, name: str, known: tuple[str, ...]) -> ConfigError:
    near = nearest(name, known)
    return ConfigError(
        f"Unknown {what} {name!r} in speculative_config",
        expected="one of " + ", ".join(METHODS if what == "method" else FIELDS),
        fix=f"Did you mean {near!r}?" if near else None,
    )


def _lookup(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Both ends of the pattern's lengths. If only one end is given, it stands for both, as in vLLM."""
    ends = {name: keys[name] for name in ("prompt_lookup_min", "prompt_lookup_max") if name in keys}
    return dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), *ends.values()) if len(ends) == 1 else ends


def _lists(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, with tuples in place of JSON's lists."""
    names = ("num_speculative_tokens_per_batch_size", "synthetic_acceptance_rates")
    lists = {name: keys[name] for name in names if isinstance(keys.get(name), list)}
    return {name: tuple(tuple(i) if isinstance(i, list) else i for i in items) for name, items in lists.items()}


def _translate(keys: dict[str, Any]) -> None:
    """Replace keys that are other names of our keys."""
    drafts = keys.get("num_speculative_tokens", SpeculativeConfig.num_speculative_tokens)
    if (size := keys.pop("disable_by_batch_size", None)) is not None:
        if type(size) is not int or size < 2:
            raise ConfigError(
                "Illegal disable_by_batch_size in speculative_config",
                value=size,
                expected="2 or more: with that number of running requests or more, there are no drafts",
            )
        schedule = ((1, size - 1, drafts), (size, _MANY, 0))
        if keys.setdefault("num_speculative_tokens_per_batch_size", schedule) != schedule:
            raise ConfigError(
                "disable_by_batch_size and num_speculative_tokens_per_batch_size say different things",
                fix="Leave disable_by_batch_size out",
            )
    if (length := keys.pop("synthetic_acceptance_length", None)) is not None:
        if "synthetic_acceptance_rates" in keys:
            raise ConfigError("synthetic_acceptance_length and synthetic_acceptance_rates are the same thing twice")
        if type(length) not in (int, float) or type(drafts) is not int or not 1 <= length <= drafts + 1:
            raise ConfigError(
                "Illegal synthetic_acceptance_length in speculative_config",
                value=length,
                expected=f"a number from 1 to num_speculative_tokens + 1 = {drafts + 1}",
            )
        # The whole part of the mean holds always; one more draft holds with the probability of the remainder.
        keys["synthetic_acceptance_rates"] = tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(drafts))
