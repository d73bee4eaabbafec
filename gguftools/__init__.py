"""Convert, quantize and judge language models in GGUF: pure Python and numba, no compiler, no torch.

>>> import gguftools
>>> f = gguftools.open(gguftools.demo_model())
>>> f.metadata["general.architecture"], f.tensors["token_embd.weight"].shape
('llama', (2048, 256))

Everything that the command line does is a function here, under the same name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gguftools._version import __version__
from gguftools.errors import GGUFError

if TYPE_CHECKING:
    from gguftools.adapter_files import load_control, load_lora
    from gguftools.conversion.lora import convert_lora
    from gguftools.conversion.run import convert
    from gguftools.demonstration import demo, demo_folder, demo_model, demo_text
    from gguftools.embedding import embed
    from gguftools.exporting.run import export
    from gguftools.generating import TextGenerator, generate
    from gguftools.gguf.reader import GGUF as open
    from gguftools.loading import load
    from gguftools.lora_merge import merge_lora
    from gguftools.measure import compare, imatrix, perplexity
    from gguftools.quantize_file import Settings, ladder, quantize
    from gguftools.recipe_file import load_recipe, recipe_of_file
    from gguftools.refining import Calibration, refine
    from gguftools.session_file import load_session, save_session
    from gguftools.templates import render
    from gguftools.toolbox.byte_order import convert_endian
    from gguftools.toolbox.check import check
    from gguftools.toolbox.dequantize import dequantize_file as dequantize
    from gguftools.toolbox.diff import diff
    from gguftools.toolbox.edit import Edits, edit
    from gguftools.toolbox.hashes import hash_file as hash
    from gguftools.toolbox.inspect import describe as inspect
    from gguftools.toolbox.split import merge, split
    from gguftools.toolbox.verify import verify
    from gguftools.vocabulary import open_vocabulary

_LAZY = {
    "open": ("gguftools.gguf.reader", "GGUF"),
    "load": ("gguftools.loading", "load"),
    "convert": ("gguftools.conversion.run", "convert"),
    "quantize": ("gguftools.quantize_file", "quantize"),
    "ladder": ("gguftools.quantize_file", "ladder"),
    "Settings": ("gguftools.quantize_file", "Settings"),
    "refine": ("gguftools.refining", "refine"),
    "Calibration": ("gguftools.refining", "Calibration"),
    "load_recipe": ("gguftools.recipe_file", "load_recipe"),
    "recipe_of_file": ("gguftools.recipe_file", "recipe_of_file"),
    "imatrix": ("gguftools.measure", "imatrix"),
    "perplexity": ("gguftools.measure", "perplexity"),
    "compare": ("gguftools.measure", "compare"),
    "inspect": ("gguftools.toolbox.inspect", "describe"),
    "convert_endian": ("gguftools.toolbox.byte_order", "convert_endian"),
    "dequantize": ("gguftools.toolbox.dequantize", "dequantize_file"),
    "diff": ("gguftools.toolbox.diff", "diff"),
    "edit": ("gguftools.toolbox.edit", "edit"),
    "Edits": ("gguftools.toolbox.edit", "Edits"),
    "export": ("gguftools.exporting.run", "export"),
    "hash": ("gguftools.toolbox.hashes", "hash_file"),
    "merge_lora": ("gguftools.lora_merge", "merge_lora"),
    "convert_lora": ("gguftools.conversion.lora", "convert_lora"),
    "merge": ("gguftools.toolbox.split", "merge"),
    "split": ("gguftools.toolbox.split", "split"),
    "verify": ("gguftools.toolbox.verify", "verify"),
    "check": ("gguftools.toolbox.check", "check"),
    "open_vocabulary": ("gguftools.vocabulary", "open_vocabulary"),
    "render": ("gguftools.templates", "render"),
    "embed": ("gguftools.embedding", "embed"),
    "generate": ("gguftools.generating", "generate"),
    "TextGenerator": ("gguftools.generating", "TextGenerator"),
    "load_control": ("gguftools.adapter_files", "load_control"),
    "load_lora": ("gguftools.adapter_files", "load_lora"),
    "load_session": ("gguftools.session_file", "load_session"),
    "save_session": ("gguftools.session_file", "save_session"),
    "demo": ("gguftools.demonstration", "demo"),
    "demo_model": ("gguftools.demonstration", "demo_model"),
    "demo_text": ("gguftools.demonstration", "demo_text"),
    "demo_folder": ("gguftools.demonstration", "demo_folder"),
}

__all__ = [
    "Calibration",
    "Edits",
    "GGUFError",
    "Settings",
    "TextGenerator",
    "__version__",
    "check",
    "compare",
    "convert",
    "convert_endian",
    "convert_lora",
    "demo",
    "demo_folder",
    "demo_model",
    "demo_text",
    "dequantize",
    "diff",
    "edit",
    "embed",
    "export",
    "generate",
    "hash",
    "imatrix",
    "inspect",
    "ladder",
    "load",
    "load_control",
    "load_lora",
    "load_recipe",
    "load_session",
    "merge",
    "merge_lora",
    "open",
    "open_vocabulary",
    "perplexity",
    "quantize",
    "recipe_of_file",
    "refine",
    "render",
    "save_session",
    "split",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'gguftools' has no attribute '{name}'")
