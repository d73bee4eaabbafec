"""What layers with a state share: tokens by sequence, and the convolution over the last few inputs of a channel."""

from __future__ import annotations

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Hparams
from engine.models.build import Build
from engine.tensor import Tensor


def check_kernel(h: Hparams) -> None:
    """A convolution looks back. Raises EngineError for one that does not."""
    if h.d_conv < 2:
        raise EngineError(f"a convolution over {h.d_conv} inputs ('d_conv'), expected 2 or more: the file is damaged")


def apart(b: Build, x: Tensor, axis: int = 1) -> Tensor:
    """[.., n] with the tokens on `axis` as [.., n / n_seq, n_seq]: each sequence for itself."""
    n = x.ne[axis] // b.n_seq
    return ops.view(b.ctx, x, (*x.ne[:axis], n, b.n_seq), (*x.nb[1 : axis + 1], x.nb[axis] * n))


def convolve(b: Build, i: int, name: str, x: Tensor) -> Tensor:
    """Each channel of x [n_channel, n] as a weighted sum of the token's and the d_conv - 1 inputs before: the weight
    `blk.{i}.<name>` is [d_conv, n_channel]; layer i keeps the last inputs as the state `conv`. Returns [n_channel, n].
    """
    ctx, weight, bias = b.ctx, b.w[f"blk.{i}.{name}.weight"], b.w.get(f"blk.{i}.{name}.bias")
    past, n_channel = weight.ne[0] - 1, weight.ne[1]
    inputs = ops.cont(ctx, ops.transpose(ctx, apart(b, x)))  # [n / n_seq, n_channel, n_seq]
    inputs = ops.concat(ctx, b.state(i, "conv", past, n_channel), inputs, 0)
    last = ops.view(ctx, inputs, (past, n_channel, b.n_seq), inputs.nb[1:3], (inputs.ne[0] - past) * inputs.nb[0])
    b.keep(i, "conv", last)
    y = ops.reshape(ctx, ops.ssm_conv(ctx, inputs, weight), n_channel, x.ne[1])
    return y if bias is None else ops.add(ctx, y, bias)
