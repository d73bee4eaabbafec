"""Strict kernels stay strict, whoever compiles them first."""

import numpy as np

from quant.jit import fast_kernel, kernel


@kernel
def _cancel(x):
    return (x + np.float32(1e8)) - np.float32(1e8)


@fast_kernel
def _fast_cancel(x):
    return (x + np.float32(1e8)) - np.float32(1e8)


@fast_kernel
def _through_fast(x):
    return _cancel(x)


def test_strict_function_called_from_a_fast_one():
    one = np.float32(1)
    assert _fast_cancel(one) == 1  # what reordering makes of it: else this test shows nothing
    assert _through_fast(one) == 0
    assert _cancel(one) == 0
