"""What is proven for each model family: the README's table, made from the families and the tests' checkpoints.

`python -m tests.gguftools.families_table` prints it.
"""

import json
from pathlib import Path

from engine.models import ARCHS, arch_of_config

COMMITTED = Path(__file__).parents[1] / "data" / "families"

#: checkpoints that lie beside the repository, not in it: family -> name, and whether the reference's file is there too
SHARED = {
    "apertus": {"apertus": True},
    "command-r": {"cohere": True},
    "deepseek2": {"deepseek2": True},
    "falcon": {"falcon": True},
    "gemma2": {"gemma2": False},
    "gemma3": {"gemma3": True},
    "gemma4": {"gemma4": False},
    "glm4moe": {"glm4moe": False},
    "gpt-oss": {"gpt-oss": True},
    "gpt2": {"gpt2": False},
    "gptneox": {"gptneox": False},
    "granite": {"granite": True},
    "granitehybrid": {"granitehybrid": False},
    "llama": {"llama": True, "llama3-rope": True, "mistral-swa": True, "mixtral": True},
    "mamba": {"mamba": True},
    "nemotron_h": {"nemotron_h": False},
    "olmo2": {"olmo2": True, "olmo3": True},
    "phi3": {"phi3": False},
    "qwen2": {"qwen2": False},
    "qwen2moe": {"qwen2moe": True},
    "qwen3": {"qwen3": True},
    "qwen35": {"qwen35": False},
    "qwen3moe": {"qwen3moe": True},
    "qwen3next": {"qwen3next": False},
    "smollm3": {"smollm3": True},
    "stablelm": {"stablelm": True},
    "starcoder2": {"starcoder2": True},
}
#: families that real models of are run: a test each
REAL = {"llama": "SmolLM2 135M", "gemma3": "Gemma 3 270M", "bert": "MiniLM"}


def checkpoints() -> dict[str, dict[str, bool]]:
    """Family -> its checkpoints, and whether the file of the reference's converter is there to compare with."""
    found = {name: dict(SHARED.get(name, {})) for name in ARCHS}
    for folder in sorted(path for path in COMMITTED.iterdir() if (path / "config.json").is_file()):
        arch = arch_of_config(json.loads((folder / "config.json").read_text()))
        found[arch.name][folder.name] = (folder / "reference.json").is_file()
    return found


def table() -> str:
    """The README's table of families."""
    rows = ["| family | classes | the original's numbers | llama.cpp's file, key by key | real model |"]
    rows.append("|---|---|---|---|---|")
    for name, those in checkpoints().items():
        classes = ", ".join(f"`{kind}`" for kind in ARCHS[name].hf_names)
        equal = ", ".join(sorted(folder for folder, has in those.items() if has))
        rows.append(f"| `{name}` | {classes} | {', '.join(sorted(those))} | {equal} | {REAL.get(name, '')} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
