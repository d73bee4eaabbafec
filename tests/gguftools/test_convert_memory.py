"""What conversion holds in memory does not grow with the model: a checkpoint of 6 GB under a limit of 1 GB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gguftools.gguf import GGUF
from tests.conftest import ROOT
from tests.gguftools.test_convert import make

LIMIT = 1_000_000_000  # bytes of private writable memory that the process may ask for
ALLOWED = 500_000_000  # bytes of anonymous memory that it may hold

N_EMBD, N_FF, N_VOCAB, N_LAYER, N_EXPERT = 2048, 4096, 131072, 10, 8
CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": N_EMBD,
    "intermediate_size": N_FF,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": N_LAYER,
    "num_local_experts": N_EXPERT,
    "num_experts_per_tok": 2,
    "vocab_size": N_VOCAB,
}

_RUN = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
import gguftools
print(gguftools.convert(sys.argv[1], sys.argv[2], sys.argv[3], threads=2).n_bytes)
"""


def shapes():
    """Names and shapes of a mixture of experts: BF16, but experts in FP8 with scales, to be stacked."""
    found = {"model.embed_tokens.weight": ("BF16", (N_VOCAB, N_EMBD)), "model.norm.weight": ("BF16", (N_EMBD,))}
    found["lm_head.weight"] = ("BF16", (N_VOCAB, N_EMBD))
    for i in range(N_LAYER):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{norm}.weight"] = ("BF16", (N_EMBD,))
        for name, rows in (("q", N_EMBD), ("k", 512), ("v", 512), ("o", N_EMBD)):
            found[f"{layer}self_attn.{name}_proj.weight"] = ("F32", (rows, N_EMBD))
        found[f"{layer}block_sparse_moe.gate.weight"] = ("F32", (N_EXPERT, N_EMBD))
        for e in range(N_EXPERT):
            for name, shape in (("w1", (N_FF, N_EMBD)), ("w2", (N_EMBD, N_FF)), ("w3", (N_FF, N_EMBD))):
                weight = f"{layer}block_sparse_moe.experts.{e}.{name}.weight"
                found[weight] = ("F8_E4M3" if i % 2 else "F32", shape)
                if i % 2:
                    found[weight + "_scale_inv"] = ("F32", (shape[0] // 128, shape[1] // 128))
    return found


def sparse(path, tensors):
    """A safetensors file whose weights are a hole, all zero."""
    sizes = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        n = sizes[dtype]
        for axis in shape:
            n *= axis
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        os.truncate(file.fileno(), 8 + len(text) + at)


def watch(arguments):
    """Peak anonymous memory of a process, bytes, and what it prints."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, int(status.split("RssAnon:")[1].split()[0]) * 1024)
        except (OSError, IndexError):
            pass
        time.sleep(0.01)
    return peak, *process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and figures of Linux")
def test_six_gigabytes_under_a_limit_of_one(tmp_path):
    """Half of the experts are dequantized on the way, all are stacked: tensors of 270 MB in the file, 67 million
    weights. Q4_0, so that the disk has little to do."""
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = make(tmp_path / "m", {}, CONFIG | {"quantization_config": quantized})
    sparse(folder / "model.safetensors", shapes())
    assert (folder / "model.safetensors").stat().st_size > 6_000_000_000
    command = [sys.executable, "-c", _RUN.replace("BYTES", str(LIMIT)), str(folder), str(tmp_path / "q.gguf"), "Q4_0"]
    peak, output, errors = watch(command)
    assert output, errors
    print(f"peak anonymous memory {peak / 1e6:.0f} MB")
    assert peak < ALLOWED
    with GGUF(tmp_path / "q.gguf") as f:
        assert f.tensors["blk.1.ffn_gate_exps.weight"].shape == (N_EXPERT, N_FF, N_EMBD)
        assert int(output) == sum(t.nbytes for t in f.tensors.values())
