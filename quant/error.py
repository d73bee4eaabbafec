"""How far a quantized tensor is from its source."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quant.errors import QuantError
from quant.format import Format
from quant.formats import get_format
from quant.quantize import check_importance, dequantize

WEIGHTS_PER_STEP = 1 << 20  # bounds the temporaries


@dataclass(frozen=True)
class ErrorReport:
    """Differences of a tensor x and its quantized form y.

    rmse: root of the mean of (x - y)^2; weighted_rmse: the same with importance as weights, None without; max_error:
    largest |x - y|; cosine: of the angle between x and y, 1 for two zero tensors; relative: rmse / root mean square of
    x (0 where both are zero); worst_block: index, counted through all rows, of the block with the largest sum of
    (weighted) squares; n: weights.
    """

    rmse: float
    weighted_rmse: float | None
    max_error: float
    cosine: float
    relative: float
    worst_block: int
    n: int


def error_report(
    x: np.ndarray,
    q: np.ndarray,
    format: str | Format,
    importance: np.ndarray | None = None,
    threads: int | None = None,
) -> ErrorReport:
    """Compare float32 rows with their quantized form.

    x: float32 [rows, n] (or [n]); q: uint8 [rows, row_size] as `quantize` gives it; importance: None or float32 [n].

    >>> import numpy as np
    >>> from quant import quantize
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)
    >>> 0.03 < error_report(x, quantize(x, "Q4_0"), "Q4_0").rmse < 0.04
    True

    Raises QuantError when the shapes do not belong together, or importance is not as `quantize` wants it.
    """
    fmt = get_format(format)
    rows, packed = np.atleast_2d(x), np.atleast_2d(q)
    if rows.ndim != 2 or packed.shape != (rows.shape[0], fmt.row_size(rows.shape[1])):
        raise QuantError(f"{fmt} rows of shape {packed.shape} do not belong to values of shape {rows.shape}")
    weight = None if importance is None else check_importance(importance, rows.shape[1]).astype(np.float64)

    n = rows.size
    squares = weighted = xx = yy = xy = 0.0
    largest = 0.0
    worst, worst_block = -1.0, 0
    step = max(1, WEIGHTS_PER_STEP // max(1, rows.shape[1]))
    for lo in range(0, rows.shape[0], step):
        source = rows[lo : lo + step].astype(np.float64)
        result = dequantize(packed[lo : lo + step], fmt, threads).astype(np.float64)
        difference = source - result
        square = difference**2
        squares += square.sum()
        xx += (source**2).sum()
        yy += (result**2).sum()
        xy += (source * result).sum()
        largest = max(largest, np.abs(difference).max(initial=0))
        if weight is not None:
            square *= weight
            weighted += square.sum()
        blocks = square.reshape(-1, fmt.block_size).sum(axis=1)
        if blocks.size and blocks.max() > worst:
            worst = blocks.max()
            worst_block = lo * (rows.shape[1] // fmt.block_size) + int(blocks.argmax())

    total_weight = 0.0 if weight is None else weight.sum() * rows.shape[0]
    norm = np.sqrt(xx) * np.sqrt(yy)
    return ErrorReport(
        rmse=float(np.sqrt(_ratio(squares, n))),
        weighted_rmse=None if weight is None else float(np.sqrt(_ratio(weighted, total_weight))),
        max_error=float(largest),
        cosine=float(xy / norm) if norm else float(xx == yy),
        relative=float(np.sqrt(_ratio(squares, xx))),
        worst_block=worst_block,
        n=n,
    )


def _ratio(a: float, b: float) -> float:
    """a / b; 0 for 0 / 0, infinity for anything else / 0."""
    if b:
        return a / b
    return float("inf") if a else 0.0
