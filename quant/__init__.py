"""Quantization formats of GGUF in numpy and numba: exact bytes, no compiler.

>>> import numpy as np, quant
>>> x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
>>> q = quant.quantize(x, "Q4_0")
>>> q.shape, quant.FORMATS["Q4_0"].bpw
((2, 18), 4.5)
>>> bool(abs(quant.dequantize(q, "Q4_0") - x).max() < 0.08)
True
"""

from quant.error import ErrorReport, error_report
from quant.errors import QuantError
from quant.format import Format
from quant.formats import FORMATS, get_format
from quant.quantize import dequantize, quantize
from quant.validate import validate

__all__ = [
    "FORMATS",
    "ErrorReport",
    "Format",
    "QuantError",
    "dequantize",
    "error_report",
    "get_format",
    "quantize",
    "validate",
]
