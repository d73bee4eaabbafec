"""One weight matrix, refined: from its weights and the second moments of its inputs to blocks of a format.

Steps, all of rows that are independent of each other: factor the moments; block by block, let the format's own
quantizer find scales for the weights with earlier errors fed back, then choose each group's scale again by trial, with
feedback inside the group; at last coordinate descent on the true error. Errors that are left over in one block are
carried into all later columns by one matrix product.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from quant.errors import QuantError
from quant.format import Format
from quant.refine.parts import Layout, Parts, apart, layout_of, together


@dataclass(frozen=True)
class Settings:
    """damping: share of its own that each diagonal entry of the moments grows by; more for few tokens, or for text of
    one kind. window: how far group scales are tried from where the quantizer put them; passes: of coordinate descent.
    """

    damping: float = 0.3
    window: int = 1
    passes: int = 2


DEFAULT = Settings()
ROWS = 32  # that a thread takes at a time

#: factors of d that are tried where a block has no other scale
_FACTORS = np.linspace(0.85, 1.15, 11, dtype=np.float32)
_POWERS = np.array([0.5, 1, 2], np.float32)


@dataclass(frozen=True)
class Factored:
    """Damped second moments H [n, n] and their factor: H = R R', R upper triangular; float64."""

    moments: np.ndarray
    factor: np.ndarray


def factored(moments: np.ndarray, damping: float) -> Factored:
    """Second moments, float64 [n, n], made safe to divide by, and their factor.

    Each diagonal entry grows by its share `damping`, and by a little of the median, so that columns which no input ever
    reached have an entry too; never by the mean, which one loud column can own. Raises QuantError where they are not
    finite, or are all zero.
    """
    diagonal = np.diag(moments)
    if not np.isfinite(moments).all():
        raise QuantError("inputs are not finite: the model or the text cannot be used for refining")
    if not diagonal.any():
        raise QuantError("inputs are all zero: no text reached this matrix")
    alive = diagonal[diagonal > 0]
    damped = moments + np.diag(damping * diagonal + 1e-4 * np.median(alive))
    try:
        factor = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    except np.linalg.LinAlgError:
        raise QuantError("second moments are singular: use more text, or more damping") from None
    return Factored(damped, np.ascontiguousarray(factor))


def refine(
    weights: np.ndarray,
    moments: Factored,
    fmt: Format,
    settings: Settings = DEFAULT,
    threads: int | None = None,
) -> np.ndarray:
    """Blocks [rows, n / block size] for weights float32 [rows, n], refined for inputs with these moments.

    Raises QuantError for formats that cannot be refined, and for rows that are no whole blocks.
    """
    layout = layout_of(fmt.name)
    weights = np.ascontiguousarray(weights, np.float32)
    rows, n = weights.shape
    fmt.row_size(n)
    run = _Rows(threads or os.cpu_count() or 1, rows)
    job = _Points(layout, moments) if layout.points is not None else _Levels(layout, moments)
    parts, q = _empty(layout, rows, n), np.empty_like(weights)
    target = weights.copy()
    with run:
        for at in range(0, n, layout.block):
            columns = slice(at, at + layout.block)
            block = np.ascontiguousarray(target[:, columns])
            _place(parts, layout, at, apart(_start(block, job.diagonal[columns], fmt, run.threads), layout))
            rounded = np.empty_like(block)
            job.round(run, block, np.ascontiguousarray(weights[:, columns]), at, settings, parts, rounded)
            q[:, columns] = rounded
            if columns.stop < n:
                target[:, columns.stop :] += (weights[:, columns] - rounded) @ job.feedback[columns, columns.stop :]
        if settings.passes:
            job.descend(run, weights, settings, parts, q)
    return together(parts, layout, fmt.block)


def relative_error(weights: np.ndarray, q: np.ndarray, moments: np.ndarray) -> float:
    """tr(e H e') / tr(w H w'), e = w - q: the share of the outputs' energy that rounding changes."""
    left, whole = weights.astype(np.float64) - q, weights.astype(np.float64)
    total = float(np.einsum("ij,ij->", whole @ moments, whole))
    return float(np.einsum("ij,ij->", left @ moments, left)) / total if total else 0.0


class _Rows:
    """Threads that each take some rows of a kernel's arguments."""

    def __init__(self, threads: int, rows: int):
        self.threads = threads
        self._spans = [(lo, min(rows, lo + ROWS)) for lo in range(0, rows, ROWS)]
        self._pool = ThreadPoolExecutor(threads)

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown()

    def each(self, work: Callable[[int, int], None]) -> None:
        for done in [self._pool.submit(work, lo, hi) for lo, hi in self._spans]:
            done.result()


def _empty(layout: Layout, rows: int, n: int) -> Parts:
    blocks, groups = n // layout.block, layout.block // layout.group
    signs = n if layout.points is not None and layout.signs != 2 else 0
    return Parts(
        np.zeros((rows, blocks), np.float32),
        np.zeros((rows, blocks), np.float32),
        np.zeros((rows, blocks, groups), np.int32),
        np.zeros((rows, blocks, groups), np.int32),
        np.zeros((rows, n // layout.dims), np.int32),
        np.zeros((rows, signs), bool),
    )


def _start(target: np.ndarray, importance: np.ndarray, fmt: Format, threads: int) -> np.ndarray:
    """Where the search begins: the format's own quantizer. One block a row; zeros where it cannot."""
    from quant.quantize import quantize_into

    blocks = np.empty((len(target), target.shape[1] // fmt.block_size), fmt.block)
    weighted = fmt.kernels.quantize_weighted is not None
    quantize_into(target, fmt, blocks, importance if weighted else None, threads)
    return blocks


def _place(parts: Parts, layout: Layout, at: int, found: Parts) -> None:
    block = at // layout.block
    parts.d[:, block], parts.dmin[:, block] = found.d[:, 0], found.dmin[:, 0]
    parts.scales[:, block], parts.mins[:, block] = found.scales[:, 0], found.mins[:, 0]


class _Levels:
    """Rounding to levels: the factor's own columns are the feedback."""

    def __init__(self, layout: Layout, moments: Factored):
        diagonal = np.diag(moments.factor)
        self._layout = layout
        self.feedback = (moments.factor / diagonal[None, :]).astype(np.float32)
        self.diagonal = (diagonal**2).astype(np.float32)
        self._moments = moments.moments.astype(np.float32)
        steps = np.diff(layout.levels)
        self._of_kernel = (
            layout.group,
            layout.levels,
            bool((steps == 1).all()),
            layout.scales or (1, 0),
            layout.mins or (1, 0),
            layout.rounding,
        )
        self._factors = _POWERS if layout.rounding else _FACTORS

    def round(self, run: _Rows, target, weights, at: int, settings: Settings, parts: Parts, q) -> None:
        from quant.refine.feedback import round_levels

        columns, block = slice(at, at + self._layout.block), at // self._layout.block
        feedback, weight = np.ascontiguousarray(self.feedback[columns, columns]), self.diagonal[columns]
        d, dmin = parts.d[:, block].copy(), parts.dmin[:, block].copy()
        scales, mins = parts.scales[:, block].copy(), parts.mins[:, block].copy()
        codes = np.zeros(target.shape, np.int32)

        def work(lo: int, hi: int) -> None:
            some = (d[lo:hi], dmin[lo:hi], scales[lo:hi], mins[lo:hi], codes[lo:hi])
            round_levels(
                target[lo:hi], weights[lo:hi], feedback, weight, self._of_kernel, settings.window, self._factors, some,
                q[lo:hi],
            )  # fmt: skip

        run.each(work)
        parts.d[:, block], parts.scales[:, block], parts.mins[:, block] = d, scales, mins
        parts.codes[:, columns] = codes

    def descend(self, run: _Rows, weights, settings: Settings, parts: Parts, q) -> None:
        from quant.refine.feedback import descend_levels

        p = parts

        def work(lo: int, hi: int) -> None:
            some = (p.d[lo:hi], p.dmin[lo:hi], p.scales[lo:hi], p.mins[lo:hi], p.codes[lo:hi])
            descend_levels(
                weights[lo:hi], self._moments, self._of_kernel, settings.window, settings.passes, some, q[lo:hi]
            )

        run.each(work)


class _Points:
    """Rounding to points: cells of columns have a small matrix each, and its inverse in the feedback."""

    def __init__(self, layout: Layout, moments: Factored):
        from scipy.linalg import solve_triangular

        n, cell = len(moments.factor), layout.cell
        self._layout, self._cell = layout, cell
        feedback, metric = np.zeros((n, n), np.float32), np.empty((n // cell, cell, cell))
        for c in range(n // cell):
            own = slice(c * cell, (c + 1) * cell)
            corner = moments.factor[own, own]
            metric[c] = corner @ corner.T
            above = moments.factor[: own.start, own]
            feedback[: own.start, own] = solve_triangular(corner, above.T, lower=False, trans="T").T
        self.feedback = feedback
        self.diagonal = np.einsum("cii->ci", metric).reshape(-1).astype(np.float32)
        self._metric = metric.astype(np.float32)
        self._moments = moments.moments.astype(np.float32)
        book = layout.book.reshape(layout.sets, -1, layout.dims)
        self._points = np.ascontiguousarray(book.transpose(0, 2, 1))
        self._squares = self._sums(self.diagonal)
        self._squares_h = self._sums(np.diag(moments.moments))
        top = layout.scales[1] if layout.scales else 0
        self._of_kernel = (layout.group, self._points, layout.signs, top)

    def _sums(self, weight: np.ndarray) -> np.ndarray:
        """Sums of weight * point^2: float32 [cells, sets, vectors, points]."""
        cells = weight.reshape(-1, 1, self._cell // self._layout.dims, self._layout.dims).astype(np.float32)
        return np.ascontiguousarray(cells @ (self._points**2)[None])

    def round(self, run: _Rows, target, weights, at: int, settings: Settings, parts: Parts, q) -> None:
        from quant.refine.feedback import round_points

        size, block = self._layout.block, at // self._layout.block
        columns, cells = slice(at, at + size), slice(at // self._cell, (at + size) // self._cell)
        codes_at = slice(at // self._layout.dims, (at + size) // self._layout.dims)
        feedback = np.ascontiguousarray(self.feedback[columns, columns])
        d, scales = parts.d[:, block].copy(), parts.scales[:, block].copy()
        codes = np.zeros((len(target), size // self._layout.dims), np.int32)
        negative = np.zeros((len(target), size if parts.negative.size else 0), bool)

        def work(lo: int, hi: int) -> None:
            round_points(
                target[lo:hi], weights[lo:hi], feedback, self._metric[cells], self._of_kernel, settings.window,
                self._squares[cells], (d[lo:hi], scales[lo:hi], codes[lo:hi], negative[lo:hi]), q[lo:hi],
            )  # fmt: skip

        run.each(work)
        parts.d[:, block], parts.scales[:, block] = d, scales
        parts.codes[:, codes_at] = codes
        if parts.negative.size:
            parts.negative[:, columns] = negative

    def descend(self, run: _Rows, weights, settings: Settings, parts: Parts, q) -> None:
        from quant.refine.feedback import descend_points

        p = parts

        def work(lo: int, hi: int) -> None:
            some = (p.d[lo:hi], p.scales[lo:hi], p.codes[lo:hi], p.negative[lo:hi])
            descend_points(
                weights[lo:hi], self._moments, self._of_kernel, self._cell, settings.window, self._squares_h,
                settings.passes, some, q[lo:hi],
            )  # fmt: skip

        run.each(work)
