"""How a kernel sees a node: a record of int64, and the few machine primitives that numba lacks.

A kernel is compiled code `(node, ith, nth, chunk)`: address of the record, the thread's number, the number of threads,
address of the node's chunk counter. Every thread calls it; it takes its share of the rows, or chunks as they come.

Record, in int64 slots: for the result and then each source the data address, ne[0..3], nb[0..3]; from PARAMS the op's
scalars (floats as the bits of a float64); from RUNTIME the scratch address, the address of BLAS's sgemm, and one number
that the backend chooses for the op (a tile).

Sync block, int64 slots, those that threads fight over a cache line apart; see the names below. There are two chunk
counters, for even and for odd nodes: while thread 0 prepares the counter of the next node, its peers may still take
chunks of this one.
"""

from __future__ import annotations

import platform

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
SCRATCH, SGEMM, CHOSEN = RUNTIME, RUNTIME + 1, RUNTIME + 2

ARRIVED, PASSED = 0, 8  # threads at the barrier; barriers passed
YIELD, ABORT = 16, 17  # addresses of C functions: give up the processor; should the run end? (0: never)
ABORTED = 18  # nodes that were done when it ended, 0 if it did not
PROGRAM, LENGTH, CLOCK, TIMES = 19, 20, 21, 22  # address and length of the program; of the clock, of the times (or 0)
CHUNK = 24  # two counters
KICKOFF = 40  # runs so far << 16 | threads that take part
SLEEPING = 48  # one a thread: 1 while it sleeps and wants to be woken
MAX_THREADS = 512
SYNC = SLEEPING + MAX_THREADS

SPIN = 500  # looks at a barrier before the first yield
LOOKS, YIELDS = 1000, 20  # looks and yields of an idle worker before it sleeps, a level of poll

_I64, _VOID = ir.IntType(64), ir.VoidType()
KERNEL = types.void(types.int64, types.int64, types.int64, types.int64)


def compiled(function):
    """Compile a kernel for calls through its address."""
    return native(KERNEL, function)


def by_format(factory):
    """Mark a function that makes the kernel for a node: the code depends on the formats of result and sources."""
    factory.variant = lambda node: ()
    return factory


def by_kind(factory):
    """The same for code that depends on the first parameter too."""
    factory.variant = lambda node: node.params[:1]
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
def load_i32(typingctx, address):
    """The int32 at an address, as int64."""

    def codegen(context, builder, sig, args):
        return builder.sext(builder.load(_pointer(builder, args[0], ir.IntType(32))), _I64)

    return types.int64(types.int64), codegen


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
    """Call a C function without arguments, that returns an int, by its address."""

    def codegen(context, builder, sig, args):
        return builder.call(_pointer(builder, args[0], ir.FunctionType(ir.IntType(32), [])), [])

    return types.int32(types.int64), codegen


@intrinsic
def atomic_exchange(typingctx, address, value):
    """Store an int64 and return the one that was there."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("xchg", _pointer(builder, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def store_i64(typingctx, address, value):
    """Store an int64 at an address."""

    def codegen(context, builder, sig, args):
        builder.store(args[1], _pointer(builder, args[0], _I64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_clock(typingctx, address):
    """Call a C function that returns an int64."""

    def codegen(context, builder, sig, args):
        return builder.call(_pointer(builder, args[0], ir.FunctionType(_I64, [])), [])

    return types.int64(types.int64), codegen


@intrinsic
def relax(typingctx):
    """Tell the processor that this thread waits in a loop (PAUSE on x86, YIELD on ARM; nothing elsewhere)."""
    machine = platform.machine().lower()

    def codegen(context, builder, sig, args):
        if machine in ("x86_64", "amd64"):
            pause = ir.FunctionType(_VOID, [])
            builder.call(cgutils.get_or_insert_function(builder.module, pause, "llvm.x86.sse2.pause"), [])
        elif machine in ("arm64", "aarch64"):
            hint = ir.FunctionType(_VOID, [ir.IntType(32)])
            builder.call(cgutils.get_or_insert_function(builder.module, hint, "llvm.aarch64.hint"), [ir.IntType(32)(1)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def sgemm(typingctx, address, transpose_a, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """c = alpha * op(a) b + beta * c in BLAS's column-major order; `address`: of Fortran's sgemm; a, b, c: of float32.

    Rows of a row-major matrix are BLAS's columns: with transpose_a, c[j, i] = alpha * sum over p of a[i, p] * b[j, p]
    for row-major a [m, k], b [n, k], c [n, m] with row strides lda, ldb, ldc in elements; without, the sum is over
    a[p, i] * b[j, p] for row-major a [k, m].
    """

    def codegen(context, builder, sig, args):
        address, transpose, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc = args
        byte, i32 = ir.IntType(8), ir.IntType(32)

        def reference(value):
            return builder.bitcast(cgutils.alloca_once_value(builder, value), byte.as_pointer())

        def size(value):
            return reference(builder.trunc(value, i32))

        def matrix(value):
            return _pointer(builder, value, byte)

        letter = builder.select(builder.icmp_signed("!=", transpose, _I64(0)), byte(ord("T")), byte(ord("N")))
        plain = reference(byte(ord("N")))
        arguments = [
            reference(letter), plain, size(m), size(n), size(k), reference(alpha), matrix(a), size(lda),
            matrix(b), size(ldb), reference(beta), matrix(c), size(ldc),
        ]  # fmt: skip
        builder.call(_pointer(builder, address, ir.FunctionType(_VOID, [byte.as_pointer()] * 13)), arguments)
        return context.get_dummy_value()

    i64 = types.int64
    f32 = types.float32
    return types.void(i64, i64, i64, i64, i64, f32, i64, i64, i64, i64, f32, i64, i64), codegen


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
def element(node, which, i1, i2, i3):
    """Address of a row of the result (0) or of source `which - 1` by its own three indices."""
    return data(node, which) + i1 * nb(node, which, 1) + i2 * nb(node, which, 2) + i3 * nb(node, which, 3)


@fast_kernel
def floats(address, n):
    """n float32 at an address."""
    return carray(pointer(address), (n,), np.float32)


@fast_kernel
def ints(address, n):
    """n int32 at an address."""
    return carray(pointer(address), (n,), np.int32)


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
        if spins > SPIN:
            call_plain(load_i64(sync + 8 * YIELD))
        else:
            relax()


@fast_kernel
def run_program(ith, nth, sync):
    """Run the program's nodes in order, all threads on each. A program is int64 [n_nodes, 2]: kernel address, record
    address. After each node thread 0 asks whether to end here; the others learn of it behind the next barrier. With
    TIMES, it notes the clock before the first node and behind each."""
    program: int = load_i64(sync + 8 * PROGRAM)
    length: int = load_i64(sync + 8 * LENGTH)
    abort, times = load_i64(sync + 8 * ABORT), load_i64(sync + 8 * TIMES)
    for i in range(length):
        chunk = sync + 8 * (CHUNK + 8 * (i % 2))
        if ith == 0:
            if times != 0:
                store_i64(times + 8 * i, call_clock(load_i64(sync + 8 * CLOCK)))
            atomic_store(chunk, nth)  # chunks 0..nth-1 belong to the threads, the rest are taken as they come
        barrier(sync, nth)
        done: int = atomic_load(sync + 8 * ABORTED)
        if done != 0 and done <= i:  # thread 0 may be a node ahead: its word counts behind the next barrier
            break
        call_kernel(load_i64(program + 16 * i), load_i64(program + 16 * i + 8), ith, nth, chunk)
        if ith == 0 and abort != 0 and i + 1 < length and call_plain(abort) != 0:
            atomic_store(sync + 8 * ABORTED, i + 1)
    barrier(sync, nth)
    if ith == 0 and times != 0:
        store_i64(times + 8 * length, call_clock(load_i64(sync + 8 * CLOCK)))


@fast_kernel
def work(ith, seen, poll, sync):
    """A worker's life between two naps: wait for runs, take part, wait again. Looks first without pause, then gives up
    the processor between looks, and returns the last run that it saw when nothing came. poll: 0 to 100, how long."""
    while True:
        spins = 0
        now: int = atomic_load(sync + 8 * KICKOFF)
        while now == seen:
            spins += 1
            if spins > poll * (LOOKS + YIELDS):
                return seen
            if spins > poll * LOOKS:
                call_plain(load_i64(sync + 8 * YIELD))
            else:
                relax()
            now = atomic_load(sync + 8 * KICKOFF)
        seen = now
        if ith < (now & 0xFFFF):
            run_program(ith, now & 0xFFFF, sync)


@fast_kernel
def publish(address, value):
    """Store an int64; what was written before is visible to whoever sees it, and no later load overtakes it."""
    atomic_exchange(address, value)


@fast_kernel
def swap(address, value):
    """Store an int64 and return the one before."""
    return atomic_exchange(address, value)


@fast_kernel
def peek(address):
    """The int64 at an address."""
    return atomic_load(address)


@fast_kernel
def next_chunk(counter):
    """Number of the next chunk that nobody has taken."""
    return atomic_add(counter, 1)


@fast_kernel
def scratch(node, ith, size):
    """Address of thread `ith`'s slice of the shared scratch: `size` bytes, on a cache line of its own."""
    return slot(node, SCRATCH) + ith * ((size + 63) // 64 * 64)
