"""The keys of a GGUF file as config.json and generation_config.json.

Every parameter goes under the first spelling that its row names; rows that are read by a function bring the way back
(`Hparam.inverse`). What comes out is read again as conversion reads it, so that nothing changes unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.models.arch import Arch, Hparams
from engine.models.rotary import LLAMA3
from engine.tokenizer.vocab import EOS_IDS, SPECIAL_KEYS
from gguftools.conversion.card import SAMPLING
from gguftools.conversion.hf import normalize, read_hparams
from gguftools.errors import GGUFError
from gguftools.gguf.reader import TensorView

#: class names whose model_type is not the name in lower case without its ending
_MODEL_TYPES = {
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "SeedOssForCausalLM": "seed_oss",
}

#: lists of rotary factors: tensor -> setting
_FACTORS = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
#: contexts that Llama 3.1's scaling may stem from, and its factors
_CONTEXTS = (8192, *(1 << n for n in range(5, 21)))


def config_of(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorView], arch: Arch, h: Hparams, dtype: str
) -> dict[str, Any]:
    """config.json. h: parameters, read from the keys; dtype: PyTorch's name of the weights' type.

    Raises GGUFError for parameters that config.json has no spelling for.
    """
    name = arch.hf_class(h) if arch.hf_class is not None else ""
    name = name if name in arch.hf_names else arch.hf_names[0]
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": _MODEL_TYPES.get(name, name.removesuffix("ForCausalLM").lower()),
    }
    for key, accepted, _ in arch.refused:
        if "." not in key and len(accepted) == 1:
            config[key] = accepted[0]
    for row in arch.rows:
        if arch.key(row) not in metadata or not row.written:
            continue
        value = _plain(getattr(h, row.field))
        if row.always and callable(row.default) and value == row.default(h):
            continue  # conversion writes it without being told
        if row.inverse is not None:
            for key, one in row.inverse(value, h).items():
                _set(config, key, one)
        elif not callable(row.config) and row.config:
            _set(config, row.config[0], value)
    for tensor, key in _FACTORS.items():
        if tensor in tensors:
            _set(config, f"rope_parameters.{key}", [_plain(v) for v in tensors[tensor].dequantize(1)])
            _set(config, "rope_parameters.rope_type", "longrope")
    _by_kind(config)
    config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if "blk.0.attn_q.bias" in tensors:
        config["attention_bias"] = True
    for kind in ("bos", "eos", "pad"):
        if SPECIAL_KEYS[kind] in metadata:
            config[f"{kind}_token_id"] = metadata[SPECIAL_KEYS[kind]]
    config["dtype"] = config["torch_dtype"] = dtype
    if "rope_freqs.weight" in tensors:
        _find_llama3(config, tensors["rope_freqs.weight"].dequantize(1), arch, h)
    _check(config, tensors, arch, h)
    return _with_old_spellings(config)


def generation_config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: the recommended sampling, and which tokens begin and end."""
    found: dict[str, Any] = {
        names[-1]: _plain(metadata[key]) for key, names in SAMPLING.items() if metadata.get(key) is not None
    }
    if "temperature" in found or "top_k" in found or "top_p" in found:
        found["do_sample"] = True
    for kind in ("bos", "pad"):
        if SPECIAL_KEYS[kind] in metadata:
            found[f"{kind}_token_id"] = metadata[SPECIAL_KEYS[kind]]
    ends = [metadata[SPECIAL_KEYS[kind]] for kind in ("eos", "eot", "eom") if SPECIAL_KEYS[kind] in metadata]
    ends += [int(i) for i in metadata.get(EOS_IDS, ())]
    ends = list(dict.fromkeys(ends))
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found


def _plain(value: Any) -> Any:
    """A value as JSON has it; float32 in the shortest spelling, a list of equal values as one."""
    if isinstance(value, (tuple, list)):
        values = [_plain(v) for v in value]
        return values[0] if len(values) > 1 and all(v == values[0] for v in values) else values
    if isinstance(value, (float, np.floating)):
        return float(str(np.float32(value)))
    return value


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a key, with dots into nested objects, unless it is there: the first row that names one counts."""
    *outer, last = key.split(".")
    for part in outer:
        config = config.setdefault(part, {})
    config.setdefault(last, value)


def _by_kind(config: dict[str, Any]) -> None:
    """Rotary settings of all layers beside those of a kind become those of the other kind."""
    rope = config.get("rope_parameters", {})
    kinds = {key: {"rope_type": "default", **value} for key, value in rope.items() if isinstance(value, dict)}
    if kinds:
        rest = {"rope_type": "default"} | {key: value for key, value in rope.items() if key not in kinds}
        config["rope_parameters"] = {"full_attention": rest, **kinds}


def _find_llama3(config: dict[str, Any], factors: np.ndarray, arch: Arch, h: Hparams) -> None:
    """The settings of Llama 3.1's scaling that give these divisors of the frequencies."""
    make = next(row.make for row in arch.tensors if row.name == "rope_freqs.weight")
    if make is None:
        return
    rope = config.setdefault("rope_parameters", {})
    for context in _CONTEXTS:
        settings = {**LLAMA3, "factor": _plain(factors.max()), "original_max_position_embeddings": context}
        config["rope_parameters"] = {**rope, **settings, "rope_type": "llama3"}
        made = make(normalize(config), h)
        if made is not None and np.array_equal(made, factors):
            return
    raise GGUFError("the divisors in 'rope_freqs.weight' follow from no settings that config.json has")


def _check(config: Mapping[str, Any], tensors: Mapping[str, TensorView], arch: Arch, h: Hparams) -> None:
    """Raises GGUFError unless the config reads as the parameters, and gives the tensors that come from it."""
    try:
        again, _, _ = read_hparams(normalize(config), arch)
        made = {row.name: row.make(normalize(config), again) for row in arch.tensors if row.make is not None}
    except EngineError as error:
        raise GGUFError(f"the parameters do not make a config.json: {error}") from None
    for row in arch.rows:
        old, new = getattr(h, row.field), getattr(again, row.field)
        if _comparable(old, h) != _comparable(new, h):
            raise GGUFError(f"key '{arch.key(row)}' is {old!r}: config.json has no place for it here ({new!r} is read)")
    for name, values in made.items():
        if (name in tensors) != (values is not None):
            raise GGUFError(f"tensor '{name}' does not follow from the keys; it cannot be exported")
        if values is not None and not np.array_equal(tensors[name].dequantize(1).reshape(-1), values.reshape(-1)):
            raise GGUFError(f"tensor '{name}' has other values than the keys imply; it cannot be exported")


def _comparable(value: Any, h: Hparams) -> Any:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    values = [float(np.float32(v)) if isinstance(v, float) else v for v in values]
    return values[0] if values and all(v == values[0] for v in values) else values


def _with_old_spellings(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings also where transformers before version 5 look for them."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return config
    rope.setdefault("rope_type", "default")
    old = {key: value for key, value in rope.items() if key != "rope_theta"}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        config["rope_scaling"] = old
    return config
