"""How the checkpoints of this folder were made: tiny models with random weights, as the original library writes them,
and its logits. Only whoever adds one needs this, with `torch` and `transformers` in an environment apart:

    python tests/data/families/make.py [--reference LLAMA_CPP] NAME ...

Every row of MODELS becomes a folder: config.json, model.safetensors (weights exact in bfloat16), the tokenizer of the
shared checkpoint `llama`, and expected.npz: two prompts `ids`, the logits at some `rows` of each, and the negative
log-probability of every next token, in float32 with plain attention. Every row of VARIANTS becomes a folder without
weights and tokenizer: base.txt names the shared checkpoint that has them. With the sources of llama.cpp and the
packages of its converter, reference.json as well: what that writes with `--outtype f32`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
SHARED = Path(os.environ.get("GGUFTOOLS_SHARED", HERE.parents[2].parent / "shared"))
GOLDEN = SHARED / "golden" / "arch"
DONOR = GOLDEN / "llama"  # of the tokenizer, and of the prompts

#: settings that a row leaves as they are, or changes; None takes one away
COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": True,
}

#: folder -> (class in transformers, settings)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama1": (
        "LlamaForCausalLM",
        {"num_key_value_heads": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_parameters": None},
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        {
            "head_dim": 32,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {"intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
    "seed_oss": ("SeedOssForCausalLM", {"head_dim": 32, "attention_bias": True, "attention_out_bias": True}),
    "stablelm-parallel": (
        "StableLmForCausalLM",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": False},
    ),
}

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}

#: folder -> (shared checkpoint, changes of its config)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite-llama3": ("granite", {"rope_parameters": LLAMA3, "attention_multiplier": 0.5, "logits_scaling": 0.5}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-growth": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "olmo3-yarn": (
        "olmo3",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3moe-linear": ("qwen3moe", {"rope_parameters": LINEAR}),
    "smollm3-yarn": ("smollm3", {"rope_parameters": YARN}),
    "stablelm-half": (
        "stablelm",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5}},
    ),
}


def randomize(model) -> None:
    """Weights that keep the size of what goes through them; norms near 1; all exact in bfloat16."""
    import torch

    generator = torch.Generator().manual_seed(7)
    for name, p in model.state_dict().items():
        noise = torch.randn(p.shape, generator=generator)
        if p.ndim > 1:
            values = noise / p.shape[-1] ** 0.5
        else:
            values = 0.1 * noise + (1.0 if name.endswith("weight") else 0.0)
        p.copy_(values.bfloat16())


def expected(model) -> dict[str, np.ndarray]:
    """Both prompts of the donor through the model."""
    import torch

    prompts, found = np.load(DONOR / "expected.npz"), {}
    for n in "01":
        ids, rows = prompts["ids" + n], prompts["rows" + n]
        logits = model(torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0]
        nll = -torch.log_softmax(logits.double(), -1)[torch.arange(len(ids) - 1), ids[1:]]
        found |= {"ids" + n: ids, "rows" + n: rows, "logits" + n: logits[rows].numpy(), "nll" + n: nll.numpy()}
    return found


def make_variant(name: str) -> None:
    """One folder without weights."""
    import torch
    import transformers

    base, changes = VARIANTS[name]
    config = json.loads((GOLDEN / base / "config.json").read_text()) | changes
    cls = getattr(transformers, config["architectures"][0])
    settings = cls.config_class.from_dict(json.loads(json.dumps(config)))
    model = cls.from_pretrained(GOLDEN / base, config=settings, dtype=torch.float32, attn_implementation="eager").eval()
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    with torch.no_grad():
        np.savez_compressed(folder / "expected.npz", **expected(model))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "base.txt").write_text(base + "\n")


def make(name: str) -> None:
    """One folder."""
    import torch
    import transformers

    kind, settings = MODELS[name]
    cls = getattr(transformers, kind)
    settings = {key: value for key, value in (COMMON | settings).items() if value is not None}
    model = cls(cls.config_class(**settings, attn_implementation="eager")).float().eval()
    folder = HERE / name
    with torch.no_grad():
        randomize(model)
        np.savez_compressed(HERE / "expected.npz", **expected(model))
    model.to(torch.bfloat16).save_pretrained(folder)
    (HERE / "expected.npz").replace(folder / "expected.npz")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DONOR / file, folder / file)


#: llama.cpp's converter, which does not know the small tokenizer by its digest
CONVERTER = """
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
convert_hf_to_gguf.main()
"""


def reference(name: str, llama_cpp: Path) -> None:
    """What llama.cpp's converter makes of the folder, as far as it takes it."""
    with tempfile.TemporaryDirectory() as temporary:
        out, folder = Path(temporary) / "model.gguf", Path(temporary) / name
        folder.mkdir()
        for source in (GOLDEN / VARIANTS[name][0] if name in VARIANTS else None, HERE / name):
            for file in source.iterdir() if source else ():
                shutil.copyfile(file, folder / file.name)
        command = [sys.executable, "-c", CONVERTER, str(folder), "--outtype", "f32", "--outfile", str(out)]
        paths = os.pathsep.join((str(llama_cpp), str(llama_cpp / "gguf-py")))
        environment = os.environ | {"PYTHONPATH": paths, "NO_LOCAL_GGUF": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            print(f"{name}: no reference: {done.stderr.strip().splitlines()[-1]}")
            return
        (HERE / name / "reference.json").write_text(json.dumps(described(out, llama_cpp), indent=1) + "\n")


def described(path: Path, llama_cpp: Path) -> dict[str, Any]:
    """Keys with types and values (long lists as a digest), and tensors with shapes and digests."""
    sys.path.insert(0, str(llama_cpp / "gguf-py"))
    from gguf import GGUFReader

    reader = GGUFReader(path)
    keys = {}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            value = field.contents()
            if isinstance(value, list) and len(value) > 64:
                digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()
                value = {"len": len(value), "first": value[:5], "sha256_of_json": digest}
            keys[key] = {"type": [kind.name for kind in field.types], "value": value}
    tensors = {
        t.name: {
            "ne": [int(n) for n in t.shape],
            "type": t.tensor_type.name,
            "sha256": hashlib.sha256(np.ascontiguousarray(t.data).tobytes()).hexdigest(),
        }
        for t in reader.tensors
    }
    return {"kv": keys, "tensors": tensors}


def main() -> None:
    """The folders named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*MODELS, *VARIANTS], metavar="NAME")
    parser.add_argument("--reference", type=Path, metavar="LLAMA_CPP", help="sources of llama.cpp")
    options = parser.parse_args()
    for name in options.names:
        (make_variant if name in VARIANTS else make)(name)
        if options.reference:
            reference(name, options.reference.resolve())


if __name__ == "__main__":
    main()
