"""Every op on both backends: the NumPy definition against the compiled kernel, over shapes, formats, strided views."""

import numpy as np
import pytest

from engine import EngineError, ops
from engine.backends import get_backend
from engine.context import Context
from engine.graph import Graph
from engine.ops.op import F32, I32
from engine.ops.table import OPS
from engine.tensor import Flag, Tensor
from quant import FORMATS, quantize

CPU = {threads: get_backend("cpu", threads) for threads in (1, 2)}


class Case:
    """Collects inputs with their values while a case builds its graph."""

    def __init__(self):
        self.ctx = Context()
        self.rng = np.random.default_rng(7)
        self.inputs: list[tuple[Tensor, np.ndarray]] = []

    def floats(self, *ne: int) -> Tensor:
        return self._input(F32, ne, self.rng.standard_normal(ne[::-1]).astype(np.float32))

    def ints(self, *values: int) -> Tensor:
        return self._input(I32, (len(values),), np.array(values, np.int32))

    def weight(self, format: str, k: int, n: int) -> Tensor:
        """A bound leaf, as weights are."""
        fmt = FORMATS[format]
        data = quantize(self.rng.standard_normal((n, k)).astype(np.float32), fmt)
        tensor = self.ctx.tensor(fmt, k, n)
        tensor.bind(data.reshape(-1))
        return tensor

    def _input(self, format, ne, values) -> Tensor:
        tensor = self.ctx.tensor(format, *ne)
        tensor.flags |= Flag.INPUT
        self.inputs.append((tensor, values.reshape(tensor.shape)))
        return tensor


def swapped(c: Case, *ne: int) -> Tensor:
    """A view with axes 1 and 2 exchanged: rows are whole, but not adjacent."""
    a = c.floats(ne[0], ne[2], ne[1], *ne[3:])
    return ops.permute(c.ctx, a, 0, 2, 1, 3)


CASES = {
    "add": lambda c: ops.add(c.ctx, c.floats(33, 5, 2, 3), c.floats(33, 5, 2, 3)),
    "add row": lambda c: ops.add(c.ctx, c.floats(33, 5), c.floats(33)),
    "add repeats in a row": lambda c: ops.add(c.ctx, c.floats(12, 5), c.floats(4, 1)),
    "add view": lambda c: ops.add(c.ctx, swapped(c, 16, 3, 5), c.floats(16, 3, 5)),
    "add twice": lambda c: (lambda a: ops.add(c.ctx, a, a))(c.floats(7, 3)),
    "mul": lambda c: ops.mul(c.ctx, c.floats(64, 7), c.floats(64)),
    "mul matrix for all": lambda c: ops.mul(c.ctx, c.floats(8, 3, 4, 2), c.floats(8, 3, 1, 1)),
    "scale": lambda c: ops.scale(c.ctx, c.floats(19, 3), -0.125),
    "swiglu": lambda c: ops.swiglu(c.ctx, ops.scale(c.ctx, c.floats(100, 9), 20.0), c.floats(100, 9)),
    "rms_norm": lambda c: ops.rms_norm(c.ctx, c.floats(256, 5, 2), 1e-5),
    "rms_norm one": lambda c: ops.rms_norm(c.ctx, c.floats(1, 1), 1e-6),
    "rms_norm view": lambda c: ops.rms_norm(c.ctx, swapped(c, 48, 3, 5), 1e-5),
    "cont transpose": lambda c: ops.cont(c.ctx, ops.transpose(c.ctx, c.floats(5, 9, 2))),
    "cont permute": lambda c: ops.cont(c.ctx, ops.permute(c.ctx, c.floats(5, 9, 2, 3), 2, 0, 3, 1)),
    "view": lambda c: ops.scale(c.ctx, ops.view(c.ctx, c.floats(10, 6), (4, 3), (40,), 40 + 8), 2.0),
    "reshape": lambda c: ops.scale(c.ctx, ops.reshape(c.ctx, c.floats(10, 6), 5, 4, 3), 2.0),
    "rope": lambda c: ops.rope(c.ctx, c.floats(64, 3, 7, 2), c.ints(*range(7)), 64, 10000.0),
    "rope part": lambda c: ops.rope(c.ctx, c.floats(64, 3, 4), c.ints(900, 3, 0, 77), 32, 500000.0, 0.25),
    "rope factors": lambda c: ops.rope(
        c.ctx, c.floats(16, 2, 3), c.ints(5, 6, 7), 16, 10000.0, freq_factors=ops.scale(c.ctx, c.floats(8), 3.0)
    ),
    "rope neox": lambda c: ops.rope(c.ctx, c.floats(24, 2, 3), c.ints(5, 6, 7), 16, 10000.0, neox=True),
    "get_rows": lambda c: ops.get_rows(c.ctx, c.floats(32, 9), c.ints(8, 0, 0, 3)),
    "mul_mat": lambda c: ops.mul_mat(c.ctx, c.floats(64, 40), c.floats(64, 17)),
    "mul_mat one row": lambda c: ops.mul_mat(c.ctx, c.floats(64, 301), c.floats(64, 1)),
    "mul_mat wide": lambda c: ops.mul_mat(c.ctx, c.floats(96, 700), c.floats(96, 5)),
    "mul_mat batch": lambda c: ops.mul_mat(c.ctx, c.floats(32, 20, 2, 3), c.floats(32, 6, 4, 3)),
    "mul_mat folded": lambda c: ops.mul_mat(c.ctx, c.floats(32, 20), c.floats(32, 6, 4, 3)),
    "mul_mat views": lambda c: ops.mul_mat(c.ctx, swapped(c, 32, 5, 4), swapped(c, 32, 3, 8)),
    "attention": lambda c: ops.attention(
        c.ctx, c.floats(32, 70, 4, 2), c.floats(32, 70, 2, 2), c.floats(32, 70, 2, 2), 0.2
    ),
    "attention past": lambda c: ops.attention(c.ctx, c.floats(16, 3, 2), c.floats(16, 9, 2), c.floats(8, 9, 2), 0.25),
    "attention one": lambda c: ops.attention(c.ctx, c.floats(16, 1, 2), c.floats(16, 1, 2), c.floats(16, 1, 2), 0.25),
    "attention views": lambda c: ops.attention(
        c.ctx, swapped(c, 16, 130, 4), swapped(c, 16, 130, 2), swapped(c, 16, 130, 2), 0.25
    ),
    "attention mask": lambda c: ops.attention(
        c.ctx, c.floats(16, 5, 2), c.floats(16, 9, 2), c.floats(16, 9, 2), 0.25, c.floats(9, 5)
    ),
}
FORMAT_CASES = {
    "get_rows": lambda c, f: ops.get_rows(c.ctx, c.weight(f, 512, 9), c.ints(8, 0, 0, 3)),
    "mul_mat": lambda c, f: ops.mul_mat(c.ctx, c.weight(f, 512, 70), c.floats(512, 6)),
    "mul_mat one row": lambda c, f: ops.mul_mat(c.ctx, c.weight(f, 512, 70), c.floats(512, 1)),
}


def writable(name: str) -> bool:
    """Can the format be written without importance, and read?"""
    fmt = FORMATS[name]
    return fmt.module is not None and fmt.kernels.quantize is not None and fmt.kernels.dequantize is not None


def run(backend, build) -> np.ndarray:
    case = Case()
    result = build(case)
    result.flags |= Flag.OUTPUT
    executable = backend.prepare(Graph().expand(result))
    for _ in range(2):  # the second run must not depend on what the first left behind
        for tensor, values in case.inputs:
            if tensor.buffer is not None:
                tensor.array()[...] = values
        executable.run()
    return result.array().copy()


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Normalised mean squared error."""
    assert np.isfinite(got).all()
    return float(((got.astype(np.float64) - want) ** 2).sum() / (want.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("threads", CPU)
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_definition(name, threads):
    want = run(get_backend("reference"), CASES[name])
    assert error(run(CPU[threads], CASES[name]), want) < 1e-11


@pytest.mark.parametrize("name", FORMAT_CASES)
@pytest.mark.parametrize("format", [f for f in FORMATS if FORMATS[f].module is not None])
def test_kernel_equals_definition_for_format(format, name):
    if not writable(format):
        pytest.skip("written with importance only, or not read: see the formats' own tests")
    want = run(get_backend("reference"), lambda c: FORMAT_CASES[name](c, format))
    assert error(run(CPU[2], lambda c: FORMAT_CASES[name](c, format)), want) < 1e-11


def test_every_op_has_a_case():
    used = set()
    for build in (*CASES.values(), lambda c: FORMAT_CASES["get_rows"](c, "Q8_0")):
        graph = Graph().expand(build(Case()))
        used |= {n.op for n in graph.nodes}
    assert used == set(OPS)


@pytest.mark.parametrize(
    "build",
    [
        lambda c: ops.add(c.ctx, c.floats(4, 3), c.floats(4, 2)),
        lambda c: ops.mul_mat(c.ctx, c.floats(4, 3), c.floats(5, 2)),
        lambda c: ops.mul_mat(c.ctx, c.floats(4, 3, 2), c.floats(4, 3, 3)),
        lambda c: ops.mul_mat(c.ctx, ops.transpose(c.ctx, c.floats(4, 4)), c.floats(4, 4)),
        lambda c: ops.reshape(c.ctx, ops.transpose(c.ctx, c.floats(4, 3)), 12),
        lambda c: ops.reshape(c.ctx, c.floats(4, 3), 13),
        lambda c: ops.view(c.ctx, c.floats(4, 3), (4, 3), (16,), 16),
        lambda c: ops.permute(c.ctx, c.floats(4, 3), 0, 0, 1, 2),
        lambda c: ops.get_rows(c.ctx, c.floats(4, 3), c.floats(2)),
        lambda c: ops.rope(c.ctx, c.floats(4, 3, 2), c.ints(1), 4, 1e4),
        lambda c: ops.attention(c.ctx, c.floats(4, 3, 3), c.floats(4, 3, 2), c.floats(4, 3, 2), 1.0),
        lambda c: ops.rms_norm(c.ctx, ops.transpose(c.ctx, c.floats(4, 3)), 1e-5),
    ],
)
def test_shapes_are_checked_when_the_graph_is_built(build):
    with pytest.raises(EngineError, match=r"^[A-Z_]+: .*\["):
        build(Case())


def test_exp_is_accurate_and_keeps_the_limits():
    from engine.kernels.math import exp

    x = np.concatenate([np.linspace(-87.3, 88.7, 20001), [-200, -1e30, 100, -np.inf, np.inf]]).astype(np.float32)
    with np.errstate(over="ignore"):
        want = np.exp(x.astype(np.float64)).astype(np.float32)
    got = np.array([exp(v) for v in x], np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.abs(got.astype(np.float64) - want) / want
    assert np.nanmax(off[: 20001]) < 3e-7
    assert got[20001:].tolist() == [0, 0, np.inf, 0, np.inf]
