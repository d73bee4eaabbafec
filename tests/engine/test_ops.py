"""Every op on both backends: the NumPy definition against the compiled kernel, over shapes, formats, strided views."""

import numpy as np
import pytest

from engine import EngineError, ops
from engine.backends import get_backend
from engine.context import Context
from engine.graph import Graph
from engine.ops import kinds
from engine.ops.op import F16, F32, I32, I64
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

    def positive(self, *ne: int) -> Tensor:
        return self._input(F32, ne, self.rng.uniform(0.1, 3, ne[::-1]).astype(np.float32))

    def halves(self, *ne: int) -> Tensor:
        return self._input(F16, ne, self.rng.standard_normal(ne[::-1]).astype(np.float16))

    def below(self, limit: int, *ne: int, format=I32) -> Tensor:
        """Indices."""
        return self._input(format, ne, self.rng.integers(limit, size=ne[::-1]))

    def mask(self, *ne: int, format=F32) -> Tensor:
        """-infinity in a third of the places."""
        hidden = self.rng.random(ne[::-1]) < 1 / 3
        return self._input(format, ne, np.where(hidden, -np.inf, self.rng.standard_normal(ne[::-1])))

    def weight(self, format: str, *ne: int) -> Tensor:
        """A bound leaf, as weights are."""
        fmt = FORMATS[format]
        data = quantize(self.rng.standard_normal(ne[::-1]).astype(np.float32).reshape(-1, ne[0]), fmt)
        tensor = self.ctx.tensor(fmt, *ne)
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
QKV = ((32, 70, 4, 2), (32, 70, 2, 2), (32, 70, 2, 2))


def attention(c: Case, q: tuple, k: tuple, v: tuple, **options) -> Tensor:
    return ops.attention(c.ctx, c.floats(*q), c.floats(*k), c.floats(*v), 0.3, **options)


def heads_of(c: Case, count: int, d: int = 16, n_head: int = 3, n_tokens: int = 8) -> list[Tensor]:
    """Small vectors, so that states do not grow without bound."""
    return [ops.scale(c.ctx, c.floats(d, n_head, n_tokens), 0.3) for _ in range(count)]


def scan(c: Case, decay: int, chosen: bool = True) -> Tensor:
    d_state, d_head, n_head, n_group, n_tokens, n_seq = 16, 5, 4, 2, 7, 2
    b, x = (c.floats(d_state, n_group, n_tokens, n_seq) for _ in range(2))
    steps, rates = c.floats(n_head, n_tokens, n_seq), ops.unary(c.ctx, "neg", c.positive(decay, n_head))
    states = c.floats(d_state, d_head, n_head, 3 if chosen else n_seq)
    inputs = c.floats(d_head, n_head, n_tokens, n_seq)
    return ops.ssm_scan(c.ctx, states, inputs, steps, rates, b, x, c.ints(2, 0) if chosen else None)


def delta(c: Case, gates: int) -> Tensor:
    d, n_head, n_tokens, n_seq = 16, 4, 9, 2
    q, k = (ops.l2_norm(c.ctx, c.floats(d, 2, n_tokens, n_seq), 1e-6) for _ in range(2))
    g = ops.unary(c.ctx, "neg", c.positive(gates, n_head, n_tokens, n_seq))
    beta = ops.sigmoid(c.ctx, c.floats(1, n_head, n_tokens, n_seq))
    return ops.gated_delta_net(
        c.ctx, q, k, c.floats(d, n_head, n_tokens, n_seq), g, beta, c.floats(d, d, n_head, n_seq)
    )


CASES |= {
    "sub": lambda c: ops.sub(c.ctx, c.floats(33, 5, 2), c.floats(33, 1, 2)),
    "div": lambda c: ops.div(c.ctx, c.floats(33, 5, 2), c.positive(1, 5, 2)),
    "mul by one number a row": lambda c: ops.mul(c.ctx, c.floats(33, 5, 2), c.floats(1, 5, 2)),
    "add in place": lambda c: ops.add(c.ctx, ops.scale(c.ctx, c.floats(9, 4), 2.0), c.floats(9, 4), inplace=True),
    "add_id": lambda c: ops.add_id(c.ctx, c.floats(12, 3, 5), c.floats(12, 7), c.below(7, 3, 5)),
    "scale and bias": lambda c: ops.scale(c.ctx, swapped(c, 19, 3, 4), -0.125, 3.0),
    "clamp": lambda c: ops.clamp(c.ctx, c.floats(50, 3), -0.5, 0.25),
    "fill": lambda c: ops.fill(c.ctx, c.floats(50, 3), 2.5),
    "xielu": lambda c: ops.xielu(c.ctx, ops.scale(c.ctx, c.floats(90, 3), 4.0), 0.8, 0.8, 0.5, -1e-6),
    "norm": lambda c: ops.norm(c.ctx, ops.scale(c.ctx, c.floats(256, 5, 2), 1.0, 3.0), 1e-5),
    "norm view": lambda c: ops.norm(c.ctx, swapped(c, 33, 5, 2), 1e-5),
    "l2_norm": lambda c: ops.l2_norm(c.ctx, swapped(c, 33, 5, 2), 1e-6),
    "group_norm": lambda c: ops.group_norm(c.ctx, c.floats(7, 3, 6, 2), 3, 1e-5),
    "sum_rows": lambda c: ops.sum_rows(c.ctx, swapped(c, 33, 5, 2)),
    "mean": lambda c: ops.mean(c.ctx, c.floats(33, 5, 2)),
    "sum": lambda c: ops.sum_all(c.ctx, swapped(c, 33, 5, 2)),
    "cumsum": lambda c: ops.cumsum(c.ctx, c.floats(33, 5, 2)),
    "argmax": lambda c: ops.argmax(c.ctx, c.floats(33, 5)),
    "argsort": lambda c: ops.argsort(c.ctx, ops.unary(c.ctx, "round", c.floats(33, 5, 2))),
    "argsort down": lambda c: ops.argsort(c.ctx, ops.unary(c.ctx, "round", c.floats(64, 5)), descending=True),
    "top_k": lambda c: ops.top_k(c.ctx, ops.unary(c.ctx, "round", c.floats(40, 5)), 7),
    "repeat": lambda c: ops.repeat(c.ctx, c.floats(5, 1, 3), 10, 4, 3, 2),
    **{
        f"concat {axis}": lambda c, axis=axis: ops.concat(
            c.ctx, c.floats(5, 4, 3, 2), c.floats(*[n + 2 * (i == axis) for i, n in enumerate((5, 4, 3, 2))]), axis
        )
        for axis in range(4)
    },
    "pad": lambda c: ops.pad(c.ctx, c.floats(5, 4, 3), 2, 1, before=(1, 0, 2)),
    "tri": lambda c: ops.tri(c.ctx, c.floats(9, 9, 2)),
    "tri upper": lambda c: ops.tri(c.ctx, c.floats(9, 9, 2), lower=False, diagonal=False),
    "diag_mask_inf": lambda c: ops.soft_max(c.ctx, ops.diag_mask_inf(c.ctx, c.floats(9, 6, 2), 3)),
    "dup": lambda c: ops.dup(c.ctx, ops.transpose(c.ctx, c.halves(5, 9))),
    "cpy other shape": lambda c: ops.cpy(c.ctx, swapped(c, 6, 4, 5), c.floats(15, 8)),
    "cpy into a view": lambda c: ops.cpy(
        c.ctx, c.floats(4, 3), ops.view(c.ctx, c.floats(10, 6), (4, 3), (40,), 40 + 8)
    ),
    "cast ints": lambda c: ops.cast(c.ctx, ops.scale(c.ctx, c.floats(9, 4), 30.0), I32),
    "cast to floats": lambda c: ops.cast(c.ctx, c.below(100, 9, 4), F32),
    "cast half of a view": lambda c: ops.cast(c.ctx, ops.transpose(c.ctx, c.halves(9, 4)), F32),
    "soft_max": lambda c: ops.soft_max(c.ctx, c.floats(70, 5, 4, 2), scale=0.3),
    "soft_max mask": lambda c: ops.soft_max(c.ctx, c.floats(70, 5, 4, 2), c.mask(70, 8, 1, 2), 0.3),
    "soft_max alibi": lambda c: ops.soft_max(c.ctx, c.floats(70, 5, 6), c.mask(70, 5, format=F16), 0.3, max_bias=8.0),
    "soft_max sinks": lambda c: ops.soft_max(c.ctx, c.floats(70, 5, 4), None, 0.3, sinks=c.floats(4)),
    "rope yarn": lambda c: ops.rope(
        c.ctx,
        c.floats(64, 2, 5),
        c.ints(0, 9, 500, 3000, 9000),
        64,
        10000.0,
        0.25,
        neox=True,
        yarn=ops.Yarn(4096, 1.0, 0.9),
    ),
    "rope offset": lambda c: ops.rope(c.ctx, c.floats(24, 2, 3), c.ints(5, 6, 7), 16, 10000.0, offset=8),
    "rope mrope": lambda c: ops.rope(c.ctx, c.floats(32, 2, 3), c.below(90, 12), 32, 1e4, sections=(4, 6, 6)),
    "rope imrope": lambda c: ops.rope(
        c.ctx, c.floats(32, 2, 3), c.below(90, 12), 24, 1e4, sections=(4, 4, 3, 1), interleaved=True
    ),
    "rope in place": lambda c: ops.rope(
        c.ctx, ops.scale(c.ctx, c.floats(16, 2, 3), 2.0), c.ints(5, 6, 7), 16, 1e4, inplace=True
    ),
    "get_rows batch": lambda c: ops.get_rows(c.ctx, c.floats(32, 9, 2, 3), c.below(9, 4, 2, 3)),
    "get_rows ints": lambda c: ops.get_rows(c.ctx, c.below(50, 32, 9), c.ints(8, 0, 0, 3)),
    "set_rows": lambda c: ops.set_rows(c.ctx, c.floats(32, 9, 2), c.floats(32, 3, 2), c.ints(8, 0, 3)),
    "set_rows wide": lambda c: ops.set_rows(
        c.ctx, c.floats(32, 1, 2), c.floats(32, 1, 2), c.below(1, 1, 2, format=I64)
    ),
    "mul_mat_id": lambda c: ops.mul_mat_id(c.ctx, c.floats(48, 70, 5), c.floats(48, 1, 40), c.below(5, 3, 40)),
    "mul_mat_id each": lambda c: ops.mul_mat_id(c.ctx, c.floats(48, 20, 5), c.floats(48, 3, 9), c.below(5, 3, 9)),
    "mul_mat_id one": lambda c: ops.mul_mat_id(c.ctx, c.floats(48, 20, 5), c.floats(48, 1, 1), c.below(5, 2, 1)),
    "attention long": lambda c: attention(c, (16, 300, 2), (16, 700, 1), (24, 700, 1)),
    "attention all": lambda c: attention(c, (16, 30, 2), (16, 20, 2), (16, 20, 2), causal=False),
    "attention window": lambda c: attention(c, (16, 300, 2), (16, 700, 1), (16, 700, 1), window=33),
    "attention narrow window": lambda c: attention(c, *QKV, window=1),
    "attention softcap": lambda c: attention(c, *QKV, softcap=0.7),
    "attention sinks": lambda c: attention(c, *QKV, sinks=c.floats(4)),
    "attention half": lambda c: ops.attention(
        c.ctx, c.floats(32, 5, 4), c.halves(32, 300, 2), c.halves(32, 300, 2), 0.25
    ),
    "attention half mask": lambda c: attention(
        c, (16, 70, 4, 2), (16, 300, 2, 2), (16, 300, 2, 2), mask=c.mask(300, 72, 1, 2, format=F16)
    ),
    "attention alibi": lambda c: attention(c, (16, 9, 6), (16, 20, 2), (16, 20, 2), mask=c.mask(20, 9), max_bias=8.0),
    "attention few": lambda c: attention(
        c, (32, 2, 6, 2), (32, 600, 2, 2), (16, 600, 2, 2), mask=c.mask(600, 2, 1, 2), sinks=c.floats(6), softcap=2.0
    ),
    "attention few alibi": lambda c: attention(
        c, (16, 3, 6), (16, 20, 2), (16, 20, 2), mask=c.mask(20, 3, 6), max_bias=8.0
    ),
    "attention few halves": lambda c: ops.attention(
        c.ctx, c.floats(32, 1, 4), c.halves(32, 300, 2), c.halves(32, 300, 2), 0.25, c.mask(300, 1, format=F16)
    ),
    "attention everything": lambda c: attention(
        c, (16, 9, 4), (16, 600, 2), (16, 600, 2), mask=c.mask(600, 9), sinks=c.floats(4), softcap=2.0
    ),
    "ssm_conv": lambda c: ops.ssm_conv(c.ctx, c.floats(4 - 1 + 9, 12, 2), c.floats(4, 12)),
    "ssm_scan": lambda c: scan(c, 16),
    "ssm_scan one decay": lambda c: scan(c, 1),
    "ssm_scan states in order": lambda c: scan(c, 1, chosen=False),
    "gated_delta_net": lambda c: delta(c, 1),
    "gated_delta_net by column": lambda c: delta(c, 16),
    "wkv6": lambda c: ops.wkv6(c.ctx, *heads_of(c, 3), c.floats(16, 3), c.positive(16, 3, 8), c.floats(768, 2)),
    "wkv7": lambda c: ops.wkv7(c.ctx, *heads_of(c, 6), c.floats(768, 2)),
    "gated_linear_attn": lambda c: ops.gated_linear_attn(c.ctx, *heads_of(c, 4), c.floats(768, 2), 0.25),
}
CASES |= {f"unary {kind}": lambda c, kind=kind: unary(c, kind) for kind in kinds.UNARY if kind != "xielu"}
CASES |= {f"glu {kind}": lambda c, kind=kind: glu(c, kind, True) for kind in kinds.GLU}
CASES |= {f"glu {kind} of halves": lambda c, kind=kind: glu(c, kind, False) for kind in kinds.GLU}


def unary(c: Case, kind: str) -> Tensor:
    a = c.positive(97, 3) if kind in ("sqrt", "log") else ops.scale(c.ctx, c.floats(97, 3), 6.0)
    return ops.unary(c.ctx, kind, a)


def glu(c: Case, kind: str, two: bool) -> Tensor:
    a = ops.scale(c.ctx, c.floats(100, 9), 10.0)
    return ops.glu(c.ctx, kind, a, c.floats(100, 9)) if two else ops.glu(c.ctx, kind, a, swapped=True)


FORMAT_CASES = {
    "get_rows": lambda c, f: ops.get_rows(c.ctx, c.weight(f, 512, 9), c.ints(8, 0, 0, 3)),
    "mul_mat": lambda c, f: ops.mul_mat(c.ctx, c.weight(f, 512, 70), c.floats(512, 6)),
    "mul_mat one row": lambda c, f: ops.mul_mat(c.ctx, c.weight(f, 512, 70), c.floats(512, 1)),
}
SOME_FORMATS = ("F16", "BF16", "Q8_0", "Q4_0", "Q6_K")
SOME_FORMAT_CASES = {
    "mul_mat_id": lambda c, f: ops.mul_mat_id(c.ctx, c.weight(f, 256, 70, 3), c.floats(256, 1, 9), c.below(3, 2, 9)),
    "cast to": lambda c, f: ops.cast(c.ctx, ops.cast(c.ctx, c.floats(256, 5), FORMATS[f]), F32),
    "cast from half": lambda c, f: ops.cast(c.ctx, ops.cast(c.ctx, c.halves(256, 5), FORMATS[f]), F32),
    "copy": lambda c, f: ops.cast(c.ctx, ops.cont(c.ctx, ops.permute(c.ctx, c.weight(f, 256, 5, 3), 0, 2, 1, 3)), F32),
    "set_rows": lambda c, f: ops.cast(
        c.ctx, ops.set_rows(c.ctx, ops.cast(c.ctx, c.floats(256, 9), FORMATS[f]), c.floats(256, 2), c.ints(7, 1)), F32
    ),
    "attention": lambda c, f: ops.attention(
        c.ctx, c.floats(256, 5, 2), c.weight(f, 256, 300, 1), c.weight(f, 256, 300, 1), 0.1
    ),
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
    if want.dtype.kind == "i":
        return float((got != want).sum())
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


@pytest.mark.parametrize("name", SOME_FORMAT_CASES)
@pytest.mark.parametrize("format", SOME_FORMATS)
def test_kernel_equals_definition_for_some_formats(format, name):
    want = run(get_backend("reference"), lambda c: SOME_FORMAT_CASES[name](c, format))
    assert error(run(CPU[2], lambda c: SOME_FORMAT_CASES[name](c, format)), want) < 1e-11


def test_kernels_cover_the_cases():
    """A node without a kernel would pass the tests above by its definition."""
    builds = [*CASES.values(), *(lambda c, b=b: b(c, "Q8_0") for b in (FORMAT_CASES | SOME_FORMAT_CASES).values())]
    for build in builds:
        for node in Graph().expand(build(Case())).nodes:
            assert CPU[1].supports(node), node


def test_every_op_has_a_case():
    used = set()
    for build in (*CASES.values(), lambda c: FORMAT_CASES["get_rows"](c, "Q8_0")):
        graph = Graph().expand(build(Case()))
        used |= {n.op for n in graph.nodes}
    assert used | {"CPY"} == set(OPS)


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
    assert np.nanmax(off[:20001]) < 3e-7
    assert got[20001:].tolist() == [0, 0, np.inf, 0, np.inf]
