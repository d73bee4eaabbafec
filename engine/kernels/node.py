"""How a kernel sees a node: a record of int64, and the few machine primitives that numba lacks.

A kernel is compiled code `(node, ith, nth, chunk)`: address of the record, the thread's number, the number of threads,
address of the node's chunk counter. Every thread calls it; it takes its share of the rows, or chunks as they come.

Record, in int64 slots: for the result and then each source the data address, ne[0..3], nb[0..3]; from PARAMS the op's
scalars (floats as the bits of a float64); from RUNTIME the scratch address and the address of BLAS's sgemm.

Sync block, int64 slots a cache line apart: threads that arrived at the barrier, generations passed, the address of the
function that gives up the processor, and two chunk counters, for even and for odd nodes: while thread 0 prepares the
counter of the next node, its peers may still take chunks of this one.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from quant.jit import fast_kernel, native

TENSOR_SLOTS = 9
PARAMS = 11 * TENSOR_SLOTS  # result and ten sources
RUNTIME = PARAMS + 16
RECORD = RUNTIME + 5  # 120 slots
SCRATCH, SGEMM = RUNTIME, RUNTIME + 1

ARRIVED, PASSED, YIELD, CHUNK = 0, 8, 16, 24
SYNC = 40

_I64, _VOID = ir.IntType(64), ir.VoidType()
KERNEL = types.void(types.int64, types.int64, types.int64, types.int64)


def compiled(function):
    """Compile a kernel for calls through its address."""
    return native(KERNEL, function)


def by_format(factory):
    """Mark a function that makes the kernel for a node: the code depends on its sources' formats."""
    factory.by_format = True
    return factory


def _pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def pointer(typingctx, address):
    """int64 address -> pointer, for carray."""

    def codegen(context, builder, sig, args):
        return _pointer(builder, args[0], ir.IntType(8))

    return types.voidptr(types.int64), codegen


@intrinsic
def load_i64(typingctx, address):
    """The int64 at an address."""

    def codegen(context, builder, sig, args):
        return builder.load(_pointer(builder, args[0], _I64))

    return types.int64(types.int64), codegen


@intrinsic
def load_f64(typingctx, address):
    """The float64 at an address."""

    def codegen(context, builder, sig, args):
        return builder.load(_pointer(builder, args[0], ir.DoubleType()))

    return types.float64(types.int64), codegen


@intrinsic
def load_f32(typingctx, address):
    """The float32 at an address."""

    def codegen(context, builder, sig, args):
        return builder.load(_pointer(builder, args[0], ir.FloatType()))

    return types.float32(types.int64), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    """The int64 at an address before `value` was added to it."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx, address):
    """The int64 at an address; what other threads wrote before they stored it is visible."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(_pointer(builder, args[0], _I64), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx, address, value):
    """Store an int64; what this thread wrote before becomes visible with it."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], _pointer(builder, args[0], _I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_kernel(typingctx, address, node, ith, nth, chunk):
    """Call a kernel by its address."""

    def codegen(context, builder, sig, args):
        function = _pointer(builder, args[0], ir.FunctionType(_VOID, [_I64] * 4))
        builder.call(function, args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def call_plain(typingctx, address):
    """Call a C function without arguments by its address."""

    def codegen(context, builder, sig, args):
        builder.call(_pointer(builder, args[0], ir.FunctionType(ir.IntType(32), [])), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def sgemm(typingctx, address, transpose_a, m, n, k, alpha, a, lda, b, ldb, c, ldc):
    """c = alpha * op(a) b in BLAS's column-major order; `address`: of Fortran's sgemm; a, b, c: of float32 data.

    Rows of a row-major matrix are BLAS's columns: with transpose_a, c[j, i] = alpha * sum over p of a[i, p] * b[j, p]
    for row-major a [m, k], b [n, k], c [n, m] with row strides lda, ldb, ldc in elements; without, the sum is over
    a[p, i] * b[j, p] for row-major a [k, m].
    """

    def codegen(context, builder, sig, args):
        address, transpose, m, n, k, alpha, a, lda, b, ldb, c, ldc = args
        byte, i32 = ir.IntType(8), ir.IntType(32)

        def reference(value):
            return builder.bitcast(cgutils.alloca_once_value(builder, value), byte.as_pointer())

        def size(value):
            return reference(builder.trunc(value, i32))

        def matrix(value):
            return _pointer(builder, value, byte)

        letter = builder.select(builder.icmp_signed("!=", transpose, _I64(0)), byte(ord("T")), byte(ord("N")))
        plain, beta = reference(byte(ord("N"))), reference(ir.FloatType()(0.0))
        arguments = [
            reference(letter), plain, size(m), size(n), size(k), reference(alpha), matrix(a), size(lda),
            matrix(b), size(ldb), beta, matrix(c), size(ldc),
        ]  # fmt: skip
        builder.call(_pointer(builder, address, ir.FunctionType(_VOID, [byte.as_pointer()] * 13)), arguments)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, i64, types.float32, i64, i64, i64, i64, i64, i64), codegen


@fast_kernel
def slot(node, index):
    """An int64 of the record."""
    return load_i64(node + 8 * index)


@fast_kernel
def param(node, index):
    """An op's scalar as int64."""
    return load_i64(node + 8 * (PARAMS + index))


@fast_kernel
def param_f32(node, index):
    """An op's scalar as float32."""
    return np.float32(load_f64(node + 8 * (PARAMS + index)))


@fast_kernel
def data(node, which):
    """Address of the result (0) or of source `which - 1`."""
    return load_i64(node + 8 * TENSOR_SLOTS * which)


@fast_kernel
def ne(node, which, axis):
    """Elements of the result (0) or of source `which - 1` along an axis."""
    return load_i64(node + 8 * (TENSOR_SLOTS * which + 1 + axis))


@fast_kernel
def nb(node, which, axis):
    """Byte stride of the result (0) or of source `which - 1` along an axis."""
    return load_i64(node + 8 * (TENSOR_SLOTS * which + 5 + axis))


@fast_kernel
def row_address(node, which, row):
    """Address of row `row` of the result (0) or of source `which - 1`; rows run over axes 1, 2, 3, shorter ones repeat.

    The number of a row is always counted along the result's axes.
    """
    n1, n2 = ne(node, 0, 1), ne(node, 0, 2)
    i1, i2, i3 = row % n1, row // n1 % n2, row // (n1 * n2)
    return (
        data(node, which)
        + i1 % ne(node, which, 1) * nb(node, which, 1)
        + i2 % ne(node, which, 2) * nb(node, which, 2)
        + i3 % ne(node, which, 3) * nb(node, which, 3)
    )


@fast_kernel
def floats(address, n):
    """n float32 at an address."""
    return carray(pointer(address), (n,), np.float32)


@fast_kernel
def n_rows(node):
    """Rows of the result."""
    return ne(node, 0, 1) * ne(node, 0, 2) * ne(node, 0, 3)


@fast_kernel
def share(n, ith, nth):
    """First and last + 1 of thread `ith`'s share of n items."""
    size = (n + nth - 1) // nth
    return min(n, size * ith), min(n, size * (ith + 1))


@fast_kernel
def barrier(sync, nth):
    """Wait until all threads are here. Spins a little, then gives up the processor between looks: a barrier that only
    spins loses milliseconds to every preempted peer."""
    if nth == 1:
        return
    passed: int = atomic_load(sync + 8 * PASSED)
    if atomic_add(sync + 8 * ARRIVED, 1) == nth - 1:
        atomic_store(sync + 8 * ARRIVED, 0)
        atomic_add(sync + 8 * PASSED, 1)
        return
    spins = 0
    while atomic_load(sync + 8 * PASSED) == passed:
        spins += 1
        if spins > 2000:
            call_plain(load_i64(sync + 8 * YIELD))


@fast_kernel
def run_program(program, ith, nth, sync):
    """Run nodes in order, all threads on each. program: int64 [n_nodes, 2] of kernel address, record address."""
    for i in range(program.shape[0]):
        chunk = sync + 8 * (CHUNK + 8 * (i % 2))
        if ith == 0:
            atomic_store(chunk, nth)  # chunks 0..nth-1 belong to the threads, the rest are taken as they come
        barrier(sync, nth)
        call_kernel(program[i, 0], program[i, 1], ith, nth, chunk)
    barrier(sync, nth)


@fast_kernel
def next_chunk(counter):
    """Number of the next chunk that nobody has taken."""
    return atomic_add(counter, 1)
