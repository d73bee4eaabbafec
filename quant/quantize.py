"""One tensor in, blocks out: checks, cuts into row blocks, runs them on threads. Every row is independent, so the
result does not depend on the number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from quant.errors import QuantError
from quant.format import Format
from quant.formats import get_format
from quant.validate import first_bad_block

IMPORTANCE_EXPONENT = 20  # the largest importance is kept within 2^-20..2^20: some searches multiply three sums of it
ROWS_PER_TASK = 1 << 17  # weights in one unit of work: small enough to balance, large enough to hide the call


def quantize(
    x: np.ndarray,
    format: str | Format,
    importance: np.ndarray | None = None,
    threads: int | None = None,
) -> np.ndarray:
    """Quantize float32 rows.

    x: float32 [rows, n] (or [n]); importance: None or float32 [n], one non-negative weight per column, as an importance
    matrix gives it; threads: None means all cores. Returns uint8 [rows, row_size].

    >>> import numpy as np
    >>> quantize(np.ones((2, 32), np.float32), "Q8_0").shape
    (2, 34)

    Raises QuantError for an unknown or unwritable type, a row that is no multiple of the block, values or importance
    that are not finite, and a type that needs importance when none is given.
    """
    fmt = get_format(format)
    rows = _rows(x, np.float32)
    blocks = np.empty((rows.shape[0], fmt.row_size(rows.shape[1]) // fmt.type_size), fmt.block)
    quantize_into(rows, fmt, blocks, importance, threads)
    return blocks.view(np.uint8).reshape(*np.shape(x)[:-1], fmt.row_size(rows.shape[1]))


def quantize_into(
    rows: np.ndarray,
    fmt: Format,
    blocks: np.ndarray,
    importance: np.ndarray | None = None,
    threads: int | None = None,
    name: str = "",
    first_row: int = 0,
) -> None:
    """As `quantize`, float32 [rows, n] into given blocks [rows, n / block_size]; `name`, and `first_row` for a piece of
    a tensor, go into messages."""
    from quant import kernels

    where = f"{name}: " if name else ""
    fmt.row_size(rows.shape[1])
    module = fmt.kernels
    if module.quantize is None and module.quantize_weighted is None:
        raise QuantError(f"{where}{fmt} is not a type that files are written in; choose another")
    tables = fmt.tables
    if importance is not None and module.quantize_weighted is not None:
        weight = check_importance(importance, rows.shape[1], name)

        def fill(lo: int, hi: int) -> None:
            kernels.quantize_rows_weighted(rows[lo:hi], weight, blocks[lo:hi], tables)
    elif module.quantize is None:
        raise QuantError(
            f"{where}{fmt} needs an importance matrix; collect one with `gguftools imatrix`, or choose another type"
        )
    else:

        def fill(lo: int, hi: int) -> None:
            kernels.quantize_rows(rows[lo:hi], blocks[lo:hi], tables)

    def work(lo: int, hi: int) -> None:  # each piece is checked while it is in the cache
        at = kernels.first_nonfinite(rows[lo:hi])
        if at >= 0:
            row, column = divmod(at, rows.shape[1])
            found = f"row {first_row + lo + row}, column {column} is {rows[lo + row, column]}"
            raise QuantError(f"{where}{found}; repair the source before quantizing")
        fill(lo, hi)
        bad = first_bad_block(blocks[lo:hi], fmt)
        if bad >= 0:
            row, column = divmod(bad * fmt.block_size, rows.shape[1])
            largest = np.abs(rows[lo + row, column : column + fmt.block_size]).max()
            found = f"row {first_row + lo + row}, column {column}: values up to {largest:.3g} overflow {fmt}"
            raise QuantError(f"{where}{found}; use BF16 or F32")

    run_rows(work, rows.shape[0], rows.shape[1], threads)


def dequantize(q: np.ndarray, format: str | Format, threads: int | None = None) -> np.ndarray:
    """The weights of quantized rows: uint8 [rows, row_size] (or [row_size]) -> float32 [rows, n].

    >>> import numpy as np
    >>> dequantize(quantize(np.ones((1, 32), np.float32), "Q4_0"), "Q4_0")[0, 0].item()
    1.0

    Raises QuantError for an unknown type or a row size that is no multiple of the block's bytes.
    """
    fmt = get_format(format)
    rows = _rows(q, np.uint8)
    if rows.shape[1] % fmt.type_size:
        raise QuantError(f"rows of {rows.shape[1]} bytes are not a multiple of {fmt.type_size} ({fmt}'s block)")
    out = dequantize_blocks(rows.view(fmt.block), fmt, threads)
    return out.reshape(*q.shape[:-1], out.shape[1])


def dequantize_blocks(blocks: np.ndarray, fmt: Format, threads: int | None = None) -> np.ndarray:
    """Blocks [rows, n / block_size] -> float32 [rows, n]."""
    from quant import kernels

    out = np.empty((blocks.shape[0], blocks.shape[1] * fmt.block_size), np.float32)
    run_rows(lambda lo, hi: kernels.dequantize_rows(blocks[lo:hi], out[lo:hi]), out.shape[0], out.shape[1], threads)
    return out


def check_importance(importance: np.ndarray, n: int, name: str = "") -> np.ndarray:
    """Importance as contiguous float32 [n]. Raises QuantError unless it is finite, non-negative and of length n.

    Only ratios count: very large or small ones are scaled by a power of two, so that sums neither overflow nor vanish.
    """
    where = f"{name}: " if name else ""
    weight = np.ascontiguousarray(importance, np.float32)
    if weight.shape != (n,):
        raise QuantError(f"{where}importance has shape {weight.shape}, the rows have {n} columns")
    bad = np.flatnonzero(~np.isfinite(weight) | (weight < 0))
    if bad.size:
        raise QuantError(
            f"{where}importance of column {bad[0]} is {weight[bad[0]]}; it must be finite and not negative: "
            "collect the importance matrix again"
        )
    exponent = int(np.frexp(weight.max(initial=0))[1])
    wanted = max(-IMPORTANCE_EXPONENT, min(IMPORTANCE_EXPONENT, exponent))
    return weight if wanted == exponent else np.ldexp(weight, wanted - exponent)


def run_rows(work: Callable[[int, int], None], rows: int, n: int, threads: int | None) -> None:
    """Call work(first row, last row + 1) for pieces of about ROWS_PER_TASK weights, on `threads` threads."""
    threads = threads or os.cpu_count() or 1
    step = max(1, ROWS_PER_TASK // max(1, n))
    starts = range(0, rows, step)
    if threads == 1 or len(starts) < 2:
        for lo in starts:
            work(lo, min(rows, lo + step))
        return
    with ThreadPoolExecutor(min(threads, len(starts))) as pool:
        futures = [pool.submit(work, lo, min(rows, lo + step)) for lo in starts]
        try:
            for future in futures:
                future.result()
        except BaseException:  # an interruption, most of all: do not finish what nobody wants
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _rows(x: np.ndarray, dtype) -> np.ndarray:
    x = np.asarray(x)
    if x.ndim not in (1, 2):
        raise QuantError(f"expected rows, an array of 1 or 2 dimensions, not {x.ndim}")
    if dtype == np.uint8 and x.dtype != np.uint8:
        raise QuantError(f"expected uint8 rows, not {x.dtype}")
    return np.ascontiguousarray(np.atleast_2d(x), dtype)
