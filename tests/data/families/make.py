"""How the checkpoints of this folder were made: tiny models with random weights, as the original library writes them,
and its logits. Only whoever adds one needs this, with `torch` and `transformers` in an environment apart:

    python tests/data/families/make.py [--reference LLAMA_CPP] NAME ...

Every row of MODELS becomes a folder: config.json, model.safetensors (weights exact in bfloat16), the tokenizer of the
shared checkpoint `llama`, and expected.npz: two prompts `ids`, the logits at some `rows` of each, and the negative
log-probability of every next token, in float32 with plain attention; of an encoder, which has its own vocabulary, the
`hidden` states. Every row of VARIANTS becomes a folder without weights and tokenizer: base.txt names the shared
checkpoint that has them. With the sources of llama.cpp and the packages of its converter, reference.json as well: what
that writes with `--outtype f32`.
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

#: settings that a row leaves as they are, or changes; None takes one of these away
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

#: compressed keys and values, one dense layer, groups of experts
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}

#: of Mamba 2 in models that mix it with attention
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}

#: folder -> (class in transformers, settings)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("Cohere2ForCausalLM", {"num_hidden_layers": 4, "sliding_window": 32, "logit_scale": 0.25}),
    "command-r-plus": ("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 0.5}),
    "deepseek2-groups": (
        "DeepseekV2ForCausalLM",
        DEEPSEEK
        | {
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "rope_theta": 10000.0,
            },
        },
    ),
    "deepseek3": (
        "DeepseekV3ForCausalLM",
        DEEPSEEK
        | {
            "q_lora_rank": 32,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "rope_theta": 10000.0,
            },
        },
    ),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"head_dim": 32, "use_bias": True}),
    "exaone4": (
        "Exaone4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 32,
            "sliding_window_pattern": 4,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            },
        },
    ),
    "exaone4-full": ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 32, "attention_bias": True}),
    "hunyuan-dense": (
        "HunYuanDenseV1ForCausalLM",
        {
            "head_dim": 32,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
        },
    ),
    # layers with a state
    "falcon-h1": (
        "FalconH1ForCausalLM",
        MAMBA2
        | {
            "hidden_size": 32,
            "head_dim": 8,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.8,
            "embedding_multiplier": 1.5,
            "key_multiplier": 0.7,
            "lm_head_multiplier": 1.25,
            "mlp_multipliers": [0.9, 1.1],
            "ssm_in_multiplier": 1.2,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "ssm_out_multiplier": 0.6,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-h1-norm": (
        "FalconH1ForCausalLM",
        MAMBA2
        | {
            "hidden_size": 32,
            "head_dim": 8,
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "lm_head_multiplier": 1.25,
        },
    ),
    "falcon-mamba": (
        "FalconMambaForCausalLM",
        {"hidden_size": 32, "state_size": 16, "expand": 2, "intermediate_size": 64},
    ),
    "granite4-attention": (
        "GraniteMoeHybridForCausalLM",
        {
            "hidden_size": 32,
            "layer_types": ["attention", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.25,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "mamba_n_heads": 8,
        },
    ),
    "granitehybrid-rope": (
        "GraniteMoeHybridForCausalLM",
        MAMBA2
        | {
            "hidden_size": 32,
            "mamba_d_head": 8,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.25,
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            "hidden_size": 32,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.5,
            "block_multiple_of": 32,
        },
    ),
    "lfm2moe": (
        "Lfm2MoeForCausalLM",
        {
            "hidden_size": 32,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "use_expert_bias": True,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "hidden_size": 32,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 16,
            "expand": 2,
            "n_groups": 2,
            "conv_kernel": 4,
            "intermediate_size": None,
        },
    ),
    "nemotron_h_moe": (
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "num_hidden_layers": None,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 32,
            "hidden_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    # its reference.json: with --no-mtp, and with `qwen3_5_text` as model_type, for which the small tokenizer is loaded
    "qwen35moe": (
        "Qwen3_5MoeForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 32,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "hidden_size": 32,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
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
    "phi2": ("PhiForCausalLM", {"intermediate_size": 256, "num_key_value_heads": 4}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {
            "sliding_window": 32,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.4, 1.8, 2.0],
                "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
                "partial_rotary_factor": 0.75,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        {
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "attention_bias": True,
            "lm_head_bias": True,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2],
                "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0, 9.0, 9.5],
                "short_mscale": 1.25,
                "long_mscale": 1.25,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "seed_oss": ("SeedOssForCausalLM", {"head_dim": 32, "attention_bias": True, "attention_out_bias": True}),
    "stablelm-parallel": (
        "StableLmForCausalLM",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": False},
    ),
    "bert": (
        "BertModel",
        {"vocab_size": 256, "num_key_value_heads": None, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
    ),
    "falcon-11b": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 96},
    ),
    "falcon-7b": ("FalconForCausalLM", {"multi_query": True, "rope_parameters": {"rope_theta": 50000.0}}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma4-experts": (
        "Gemma4ForCausalLM",
        {
            "intermediate_size": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 32,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4-shared": (
        "Gemma4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "hidden_size": 48,
            "intermediate_size": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 32,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 2048,
        },
    ),
    "gptneox-sequential": (
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 48,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_fast",
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_theta": 50000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "starcoder2-window": ("Starcoder2ForCausalLM", {"sliding_window": 32, "use_bias": False}),
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
            values = 0.1 * noise + (1.0 if name.endswith(("weight", "scale", "scalar")) else 0.0)
        p.copy_(values.bfloat16())


def expected(model) -> dict[str, np.ndarray]:
    """Both prompts of the donor through the model."""
    import torch

    prompts, found = np.load(DONOR / "expected.npz"), {}
    for n in "01":
        ids, rows = prompts["ids" + n] % model.config.vocab_size, prompts["rows" + n]
        found["ids" + n] = ids
        if not hasattr(model, "lm_head") and not hasattr(model, "embed_out"):
            found["hidden" + n] = model(torch.tensor(ids[None].astype(np.int64))).last_hidden_state[0].numpy()
            continue
        logits = model(torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0]
        nll = -torch.log_softmax(logits.double(), -1)[torch.arange(len(ids) - 1), ids[1:]]
        found |= {"rows" + n: rows, "logits" + n: logits[rows].numpy(), "nll" + n: nll.numpy()}
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
    settings = {key: value for key, value in (COMMON | settings).items() if value is not None or key not in COMMON}
    model = cls(cls.config_class(**settings, attn_implementation="eager")).float().eval()
    folder = HERE / name
    with torch.no_grad():
        randomize(model)
        np.savez_compressed(HERE / "expected.npz", **expected(model))
    model.to(torch.bfloat16).save_pretrained(folder)
    (HERE / "expected.npz").replace(folder / "expected.npz")
    if name == "bert":
        sentence_files(folder)
        return
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DONOR / file, folder / file)


def sentence_files(folder: Path) -> None:
    """A WordPiece vocabulary of letters and a few words, and what sentence-transformers adds to a folder."""
    from tokenizers import BertWordPieceTokenizer

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    words = ["the", "quick", "brown", "fox", "jump", "##s", "over", "lazy", "dog", "hello", "world", "##ing", "##ed"]
    pieces = dict.fromkeys([*special, *letters, *("##" + c for c in letters if c.isalnum()), *words])
    tokenizer = BertWordPieceTokenizer({piece: i for i, piece in enumerate(pieces)})
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    settings |= {piece[1:-1].lower() + "_token": piece for piece in special}
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    pooling = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for file, content in (
        ("tokenizer_config.json", settings),
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
    ):
        (folder / file).write_text(json.dumps(content, indent=1) + "\n")


#: llama.cpp's converter, which does not know the small tokenizer by its digest, nor expects it in some families
CONVERTER = """
import convert_hf_to_gguf
from conversion.base import TextModel
from conversion.gemma import Gemma4Model, GemmaModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
GemmaModel.set_vocab = Gemma4Model.set_vocab = TextModel._set_vocab_gpt2
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
