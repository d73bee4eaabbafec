"""Peak anonymous memory of a command: `python tests/bench/memory.py convert|quantize|perplexity|...` on a large model.

Anonymous memory is what a process holds beyond mapped files (RssAnon in /proc): it is sampled every 10 ms. `--make DIR
GIGABYTES` writes a random bf16 model of about that size to try `convert` on; everything behind `--` is run and watched.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import gguftools


def make(folder: Path, gigabytes: float) -> None:
    """A Llama-shaped checkpoint with the package's tokenizer, embeddings of 128,256 rows, and random weights."""
    n_embd, n_ff, n_vocab, heads, kv = 2048, 8192, 128256, 32, 8
    layer = 2 * (n_embd * n_embd * 2 + 2 * n_embd * kv * 64 + 3 * n_embd * n_ff)
    n_layer = max(1, round((gigabytes * 1e9 - 2 * n_vocab * n_embd) / layer))
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(gguftools.demo_folder() / name, folder)
    config = json.loads((gguftools.demo_folder() / "config.json").read_text(encoding="utf-8"))
    config |= {
        "hidden_size": n_embd, "intermediate_size": n_ff, "vocab_size": n_vocab, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": 64, "num_hidden_layers": n_layer,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (n_vocab, n_embd), "model.norm.weight": (n_embd,)}
    for i in range(n_layer):
        block = f"model.layers.{i}."
        shapes |= {block + "input_layernorm.weight": (n_embd,), block + "post_attention_layernorm.weight": (n_embd,)}
        shapes |= {block + f"self_attn.{x}_proj.weight": (n_embd, n_embd) for x in "qo"}
        shapes |= {block + f"self_attn.{x}_proj.weight": (kv * 64, n_embd) for x in "kv"}
        shapes |= {block + f"mlp.{x}_proj.weight": (n_ff, n_embd) for x in ("gate", "up")}
        shapes[block + "mlp.down_proj.weight"] = (n_embd, n_ff)
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = (np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while at > 0:
            file.write(noise[: at // 2].tobytes())
            at -= noise.nbytes
    print(f"{folder}: {n_layer} layers, largest tensor {2 * n_vocab * n_embd / 1e6:.0f} MB")


def watch(command: list[str]) -> int:
    """Run; prints seconds and the peak of RssAnon."""
    started = time.perf_counter()
    process = subprocess.Popen(command)
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, int(status.split("RssAnon:")[1].split()[0]))
        except (OSError, IndexError):
            pass
        time.sleep(0.01)
    print(f"{time.perf_counter() - started:.1f} s, peak anonymous memory {peak / 1000:.0f} MB", file=sys.stderr)
    return process.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", nargs=2, metavar=("DIR", "GB"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.make:
        make(Path(arguments.make[0]), float(arguments.make[1]))
    if arguments.command:
        command = arguments.command[1:] if arguments.command[0] == "--" else arguments.command
        sys.exit(watch([sys.executable, "-m", "gguftools", *command]))


if __name__ == "__main__":
    main()
