"""Layers with a state: SSM_CONV and SSM_SCAN (Mamba), GATED_DELTA_NET (Qwen3-Next), WKV6 and WKV7 (RWKV), GATED_LINEAR.

Those that change a state return one tensor: the outputs of all tokens, then the new states, to be taken apart by views.
Inputs are float32; states and gates contiguous.
"""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F32, I32, Op, need, need_rows, node, values
from engine.tensor import Tensor


def ssm_conv(ctx: Context, x: Tensor, c: Tensor) -> Tensor:
    """out[i, t, s] = sum over j of c[j, i] * x[t + j, i, s]: a causal convolution of each channel.

    x: [d_conv - 1 + n_tokens, d_inner, n_seq], the last inputs of the run before in front; c: [d_conv, d_inner].
    Returns [d_inner, n_tokens, n_seq].
    """
    need_rows("SSM_CONV", x, c)
    need(x.ne[1] == c.ne[1] and x.ne[0] >= c.ne[0] and x.ne[3] == 1, "SSM_CONV", "shapes do not fit", x, c)
    return node(ctx, "SSM_CONV", F32, (c.ne[1], x.ne[0] - c.ne[0] + 1, x.ne[2]), (x, c))


def ssm_scan(
    ctx: Context, s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, ids: Tensor | None = None
) -> Tensor:
    """For each token: state = state * e^(softplus(dt) A) + B (x softplus(dt)); y = state . C (Gu and Dao 2023, arXiv
    2312.00752; with a of one number a head, Dao and Gu 2024, arXiv 2405.21060).

    s: states [d_state, d_head, n_head, n_states]; x: [d_head, n_head, n_tokens, n_seq]; dt: [n_head, n_tokens, n_seq];
    a: [d_state or 1, n_head]; b, c: [d_state, n_group, n_tokens, n_seq]; ids: I32 [n_seq], each sequence's state in s,
    None: as many states as sequences, in their order.
    Returns float32 [n]: y of x's shape, then the states of the n_seq sequences.
    """
    need_rows("SSM_SCAN", s, x, dt, a, b, c)
    need(all(t.is_contiguous for t in (s, dt, a)), "SSM_SCAN", "states, steps and decay must be contiguous", s, dt, a)
    d_state, d_head, n_head = s.ne[:3]
    n_tokens, n_seq = x.ne[2:]
    need(x.ne[:2] == (d_head, n_head), "SSM_SCAN", "heads do not fit", s, x)
    need(dt.ne == (n_head, n_tokens, n_seq, 1), "SSM_SCAN", "one step a head and token", x, dt)
    need(a.ne[0] in (1, d_state) and a.ne[1] == n_head, "SSM_SCAN", "decay does not fit", s, a)
    need(
        b.ne == c.ne and b.ne[0] == d_state and b.ne[2:] == (n_tokens, n_seq), "SSM_SCAN", "B and C do not fit", s, b, c
    )
    need(n_head % b.ne[1] == 0, "SSM_SCAN", "groups do not divide the heads", x, b)
    fits = s.ne[3] == n_seq if ids is None else ids.format is I32 and ids.ne[0] == n_seq
    need(fits, "SSM_SCAN", "one state a sequence", x, s)
    size = x.n_elements + d_state * d_head * n_head * n_seq
    return node(ctx, "SSM_SCAN", F32, (size,), (s, x, dt, a, b, c, ids))


def gated_delta_net(ctx: Context, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """For each token: S = S e^g; d = beta (v - S k); S = S + d k^T; out = S q / sqrt(d) (Yang et al. 2024, arXiv
    2412.06464).

    q, k: [d, n_head_k, n_tokens, n_seq], head h of v takes head h % n_head_k; v: [d, n_head, n_tokens, n_seq]; g:
    [1 or d, n_head, n_tokens, n_seq], a decay a head or a column; beta: [1, n_head, n_tokens, n_seq]; state:
    [d, d, n_head, n_seq], row j is what value j has learned. Returns [d * n_head, n_tokens * n_seq + d * n_seq].
    """
    need_rows("GATED_DELTA_NET", q, k, v, g, beta, state)
    d, n_head, n_tokens, n_seq = v.ne
    need(
        g.is_contiguous and beta.is_contiguous and state.is_contiguous,
        "GATED_DELTA_NET",
        "contiguous gates",
        g,
        beta,
        state,
    )
    need(q.ne[0] == k.ne[0] == d and q.ne[2:] == k.ne[2:] == v.ne[2:], "GATED_DELTA_NET", "heads do not fit", q, k, v)
    need(n_head % q.ne[1] == 0 and n_head % k.ne[1] == 0, "GATED_DELTA_NET", "heads do not repeat", q, k, v)
    need(g.ne[0] in (1, d) and g.ne[1:] == v.ne[1:], "GATED_DELTA_NET", "decay does not fit", g, v)
    need(
        beta.ne == (1, *v.ne[1:]) and state.ne == (d, d, n_head, n_seq),
        "GATED_DELTA_NET",
        "state does not fit",
        v,
        state,
    )
    return node(ctx, "GATED_DELTA_NET", F32, (d * n_head, (n_tokens + d) * n_seq), (q, k, v, g, beta, state))


def _linear(
    ctx: Context, op: str, tensors: tuple[Tensor, ...], shared: tuple[Tensor, ...], state: Tensor, params: tuple = ()
):
    d, n_head, n_tokens = tensors[0].ne[:3]
    n_seq = state.ne[1]
    need_rows(op, *tensors, *shared, state)
    need(all(t.is_contiguous for t in (*tensors, *shared, state)), op, "contiguous tensors", *tensors)
    need(all(t.ne == (d, n_head, n_tokens, 1) for t in tensors), op, "shapes differ", *tensors)
    need(all(t.n_elements == d * n_head for t in shared), op, "one number a channel", *shared)
    need(
        state.n_elements == d * d * n_head * n_seq and n_tokens % n_seq == 0,
        op,
        "state does not fit",
        tensors[0],
        state,
    )
    return node(ctx, op, F32, (d * n_head, n_tokens + d * n_seq), (*tensors, *shared, state), params)


def wkv6(ctx: Context, k: Tensor, v: Tensor, r: Tensor, first: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """RWKV 6 (Peng et al. 2024, arXiv 2404.05892): out = r (first k v^T + S); S = decay S + k v^T.

    k, v, r, decay: [d, n_head, n_tokens]; first: [d, n_head]; state: [d * d * n_head, n_seq], tokens of a sequence side
    by side. Returns [d * n_head, n_tokens + d * n_seq].
    """
    return _linear(ctx, "RWKV_WKV6", (k, v, r, decay), (first,), state)


def gated_linear_attn(ctx: Context, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """Gated linear attention (Yang et al. 2023, arXiv 2312.06635): S = g S + k v^T; out = scale q S. Shapes as in
    wkv6."""
    return _linear(ctx, "GATED_LINEAR_ATTN", (k, v, q, g), (), state, (float(scale),))


def wkv7(ctx: Context, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """RWKV 7 (Peng et al. 2025, arXiv 2503.14456): S = S diag(w) + v k^T + (S a) b^T; out = S r. Shapes as in wkv6."""
    return _linear(ctx, "RWKV_WKV7", (r, w, k, v, a, b), (), state)


def _ssm_conv(n: Tensor) -> np.ndarray:
    x, c = (values(s)[0] for s in n.src)
    windows = np.lib.stride_tricks.sliding_window_view(x, c.shape[-1], axis=-1)  # (n_seq, d_inner, n_tokens, d_conv)
    return np.einsum("sitj,ij->sti", windows, c[0])[None]


def _ssm_scan(n: Tensor) -> np.ndarray:
    s, x, dt, a, b, c = (values(t) for t in n.src[:6])
    n_tokens, n_head = x.shape[1:3]
    state = (s if n.src[6] is None else s[values(n.src[6])[0, 0, 0]]).copy()  # (n_seq, n_head, d_head, d_state)
    group = n_head // b.shape[2]
    b, c = np.repeat(b, group, 2), np.repeat(c, group, 2)
    y = np.empty_like(x)
    for t in range(n_tokens):
        step = np.logaddexp(np.float32(0), dt[0, :, t])[..., None]  # (n_seq, n_head, 1)
        state = state * np.exp(step * a[0, 0])[:, :, None] + (x[:, t] * step)[..., None] * b[:, t, :, None]
        y[:, t] = np.einsum("shdn,shn->shd", state, c[:, t])
    return np.concatenate([y.ravel(), state.ravel()]).reshape(n.shape)


def _gated_delta_net(n: Tensor) -> np.ndarray:
    q, k, v, g, beta, state = (values(t) for t in n.src)
    n_head, d = v.shape[2:]
    q, k = (np.tile(t, (1, 1, n_head // t.shape[2], 1)) for t in (q, k))
    state, out = state.copy(), np.empty_like(v)  # (n_seq, n_head, value, key)
    for t in range(v.shape[1]):
        state = state * np.exp(g[:, t])[:, :, None]
        delta = (v[:, t] - np.einsum("shvk,shk->shv", state, k[:, t])) * beta[:, t]
        state = state + delta[..., None] * k[:, t, :, None]
        out[:, t] = np.einsum("shvk,shk->shv", state, q[:, t]) * np.float32(1 / np.sqrt(np.float32(d)))
    return np.concatenate([out.ravel(), state.ravel()]).reshape(n.shape)


def _tokens(n: Tensor):
    """(inputs, each [n_seq, n_tokens, n_head, d]; state [n_seq, n_head, d, d])."""
    *inputs, state = (values(t) for t in n.src)
    n_seq = n.src[-1].ne[1]
    n_head, d = inputs[0].shape[2:]
    return [t.reshape(n_seq, -1, n_head, d) for t in inputs], state.reshape(n_seq, n_head, d, d).copy()


def _wkv6(n: Tensor) -> np.ndarray:
    (k, v, r, decay, first), state = _tokens_and_shared(n)
    out = np.empty_like(k)
    for t in range(k.shape[1]):
        pairs = k[:, t, :, :, None] * v[:, t, :, None]
        out[:, t] = np.einsum("shi,shij->shj", r[:, t], first[..., None] * pairs + state)
        state = decay[:, t, ..., None] * state + pairs
    return np.concatenate([out.ravel(), state.ravel()]).reshape(n.shape)


def _tokens_and_shared(n: Tensor):
    k, v, r, decay, first, state = n.src
    part = Tensor(F32, (1,))
    part.src = (k, v, r, decay, state)
    inputs, states = _tokens(part)
    return [*inputs, values(first).reshape(inputs[0].shape[2:])], states


def _gated_linear(n: Tensor) -> np.ndarray:
    (k, v, q, g), state = _tokens(n)
    out = np.empty_like(k)
    for t in range(k.shape[1]):
        state = g[:, t, ..., None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        out[:, t] = np.einsum("shi,shij->shj", q[:, t] * np.float32(n.params[0]), state)
    return np.concatenate([out.ravel(), state.ravel()]).reshape(n.shape)


def _wkv7(n: Tensor) -> np.ndarray:
    (r, w, k, v, a, b), state = _tokens(n)  # state: (n_seq, n_head, value, key)
    out = np.empty_like(k)
    for t in range(k.shape[1]):
        seen = np.einsum("shvk,shk->shv", state, a[:, t])
        state = state * w[:, t, :, None] + v[:, t, ..., None] * k[:, t, :, None] + seen[..., None] * b[:, t, :, None]
        out[:, t] = np.einsum("shvk,shk->shv", state, r[:, t])
    return np.concatenate([out.ravel(), state.ravel()]).reshape(n.shape)


_KERNELS = "engine.kernels.recurrent:"

OPS = (
    Op("SSM_CONV", _ssm_conv, _KERNELS + "ssm_conv"),
    Op("SSM_SCAN", _ssm_scan, _KERNELS + "ssm_scan"),
    Op("GATED_DELTA_NET", _gated_delta_net, _KERNELS + "gated_delta_net"),
    Op("RWKV_WKV6", _wkv6, _KERNELS + "wkv6"),
    Op("RWKV_WKV7", _wkv7, _KERNELS + "wkv7"),
    Op("GATED_LINEAR_ATTN", _gated_linear, _KERNELS + "gated_linear"),
)
