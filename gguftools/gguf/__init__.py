"""The GGUF container: `GGUF` reads, `Writer` writes, `values.py` and `keys.py` hold what both know of metadata."""

from gguftools.gguf.reader import GGUF, TensorView
from gguftools.gguf.values import Field, ValueType
from gguftools.gguf.writer import Writer

__all__ = ["GGUF", "Field", "TensorView", "ValueType", "Writer"]
