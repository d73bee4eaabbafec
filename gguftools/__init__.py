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
    from gguftools.commands.inspect import describe as inspect
    from gguftools.conversion.run import convert
    from gguftools.demonstration import demo, demo_folder, demo_model, demo_text
    from gguftools.gguf.reader import GGUF as open
    from gguftools.loading import load
    from gguftools.measure import compare, imatrix, perplexity
    from gguftools.quantize_file import quantize

_LAZY = {
    "open": ("gguftools.gguf.reader", "GGUF"),
    "load": ("gguftools.loading", "load"),
    "convert": ("gguftools.conversion.run", "convert"),
    "quantize": ("gguftools.quantize_file", "quantize"),
    "imatrix": ("gguftools.measure", "imatrix"),
    "perplexity": ("gguftools.measure", "perplexity"),
    "compare": ("gguftools.measure", "compare"),
    "inspect": ("gguftools.commands.inspect", "describe"),
    "demo": ("gguftools.demonstration", "demo"),
    "demo_model": ("gguftools.demonstration", "demo_model"),
    "demo_text": ("gguftools.demonstration", "demo_text"),
    "demo_folder": ("gguftools.demonstration", "demo_folder"),
}

__all__ = [
    "GGUFError",
    "__version__",
    "compare",
    "convert",
    "demo",
    "demo_folder",
    "demo_model",
    "demo_text",
    "imatrix",
    "inspect",
    "load",
    "open",
    "perplexity",
    "quantize",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'gguftools' has no attribute '{name}'")
