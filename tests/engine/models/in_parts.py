"""Sequences that come in parts: a memory that holds what layers kept of one part until the next, as arrays."""

import numpy as np

from engine import ops
from engine.context import Context
from engine.graph import Graph
from engine.models.build import Build
from engine.ops.op import F32, I32
from engine.tensor import Flag


class Remembered:
    """A `SequenceMemory` over arrays. past: what the parts before left; kept: tensors that will hold what this one
    leaves."""

    def __init__(self, n_seq, past):
        self.n_seq, self.past = n_seq, past
        self.given, self.kept, self._joined = {}, {}, {}

    def attend(self, b, layer, q, k, v, scale, **options):
        if k is not None:
            self._joined[layer] = [self._join(b, f"{layer}.{name}", new) for name, new in (("k", k), ("v", v))]
        q = self._apart(b, q)
        q, k, v = (ops.permute(b.ctx, t, 0, 2, 1, 3) for t in (q, *self._joined[layer]))
        y = ops.attention(b.ctx, q, k, v, scale, **options)
        return ops.reshape(b.ctx, y, y.ne[0] * y.ne[1], y.ne[2] * y.ne[3])

    def state(self, b, layer, name, *ne):
        key = f"{layer}.{name}"
        if key not in self.past:
            shape = (*ne, self.n_seq, *[1] * (3 - len(ne)))[::-1]
            self.past[key] = np.zeros(shape, np.float32)
        return self._given(b, key)

    def keep(self, b, layer, name, new):
        key = f"{layer}.{name}"
        assert new.ne == self.given[key].ne
        self._keep(b, key, new)

    def _join(self, b, key, new):
        new = self._apart(b, new)
        if key in self.past:
            new = ops.concat(b.ctx, self._given(b, key), new, 2)
        self._keep(b, key, new)
        return new

    def _apart(self, b, t):
        n = t.ne[2] // self.n_seq
        return ops.view(b.ctx, t, (t.ne[0], t.ne[1], n, self.n_seq), (t.nb[1], t.nb[2], t.nb[2] * n))

    def _given(self, b, key):
        assert key not in self.given, "a state is asked for once"
        self.given[key] = b.ctx.tensor(F32, *self.past[key].shape[::-1], name=key)
        self.given[key].flags |= Flag.INPUT
        return self.given[key]

    def _keep(self, b, key, new):
        assert key not in self.kept, "a state is kept once"
        self.kept[key] = ops.cont(b.ctx, new)
        self.kept[key].flags |= Flag.OUTPUT


def run_part(session, tokens, first, past, n_ctx):
    """Hidden states [n_seq, n, n_embd] of tokens [n_seq, n] at positions `first` and later, and what is left of them
    and of `past` for the next part. n_ctx: tokens of all parts."""
    n_seq, n = tokens.shape
    ctx = Context(64 << 20)
    memory = Remembered(n_seq, dict(past))
    b = Build(ctx, session.arch, session.hparams, session.weights, memory, n_ctx=n_ctx)
    b.tokens, b.positions = (ctx.tensor(I32, n_seq * n) for _ in range(2))
    b.tokens.flags |= Flag.INPUT
    b.positions.flags |= Flag.INPUT
    result = b.body()
    result.flags |= Flag.OUTPUT
    graph = Graph(16384, ctx).expand(result)
    for tensor in memory.kept.values():
        graph.expand(tensor)
    executable = session.backend.prepare(graph)
    b.tokens.array()[...] = tokens.reshape(-1)
    if b.positions.buffer is not None:
        b.positions.array()[...] = np.tile(np.arange(first, first + n), n_seq)
    for key, tensor in memory.given.items():
        tensor.array()[...] = memory.past[key]
    executable.run()
    left = {key: tensor.array().copy() for key, tensor in memory.kept.items()}
    return result.array()[0, 0].reshape(n_seq, n, -1).copy(), left
