"""Sixteen float32 side by side, as one value in kernels.

Searches are sequential inside a group of weights, because the reference's bytes depend on the order of sums; but
groups are independent. So kernels put sixteen groups into the lanes of a vector and run the scalar algorithm once for
all: `+ - * /`, `<`, `>`, `==`, `&` and `|` work lane by lane, and `select` takes the place of a branch. Each lane gets
exactly the float32 operations of the scalar program, so results are equal to the last bit; LLVM maps the vectors to
the CPU.

    lo = select(v < lo, v, lo)            # `if v < lo: lo = v` in sixteen groups at once

The functions of this file exist in compiled code only; arrays are C-contiguous and addressed by flat index.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import lower_builtin, models, register_model, type_callable

WIDTH = 16

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, WIDTH)
_INTS = ir.VectorType(_INT, WIDTH)
_BYTES = ir.VectorType(ir.IntType(8), WIDTH)
_BITS = ir.VectorType(ir.IntType(1), WIDTH)


class Lanes(types.Type):
    """numba's type of sixteen float32."""

    def __init__(self):
        super().__init__("lanes")


class Mask(types.Type):
    """numba's type of sixteen booleans."""

    def __init__(self):
        super().__init__("mask")


LANES, MASK = Lanes(), Mask()
register_model(Lanes)(lambda manager, kind: models.PrimitiveModel(manager, kind, _FLOATS))
register_model(Mask)(lambda manager, kind: models.PrimitiveModel(manager, kind, _BITS))


def intrinsic(function: Callable) -> Any:
    """numba's decorator; the result is called without the typing context, which type checkers cannot know."""
    return numba_intrinsic(function)


def _constant(vector, value):
    return ir.Constant(vector, [value] * WIDTH)


def _splat(builder, value):
    """A float32 in all lanes."""
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(first, first, _constant(_INTS, 0))


def _spread(builder, value):
    """An int32 in all lanes."""
    first = builder.insert_element(ir.Constant(_INTS, ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(first, first, _constant(_INTS, 0))


def _define(operation, result, emit):
    """Let `operation` take lanes with lanes, or lanes with a float32, in any order."""

    @type_callable(operation)
    def type_of(context):
        def typer(a, b):
            if {a, b} in ({LANES}, {LANES, types.float32}):
                return result

        return typer

    def lower(context, builder, signature, args):
        return emit(builder, *(a if a.type == _FLOATS else _splat(builder, a) for a in args))

    for pair in ((Lanes, Lanes), (Lanes, types.Float), (types.Float, Lanes)):
        lower_builtin(operation, *pair)(lower)


def _define_logic(operation, emit):
    """Let `operation` take masks."""
    type_callable(operation)(lambda context: lambda a, b: MASK if a == b == MASK else None)
    lower_builtin(operation, Mask, Mask)(lambda context, builder, signature, args: emit(builder, *args))


def _comparison(symbol):
    return lambda builder, a, b: builder.fcmp_ordered(symbol, a, b)


for _operation, _result, _emit in (
    (operator.add, LANES, ir.IRBuilder.fadd),
    (operator.sub, LANES, ir.IRBuilder.fsub),
    (operator.mul, LANES, ir.IRBuilder.fmul),
    (operator.truediv, LANES, ir.IRBuilder.fdiv),
    (operator.lt, MASK, _comparison("<")),
    (operator.gt, MASK, _comparison(">")),
    (operator.eq, MASK, _comparison("==")),
):
    _define(_operation, _result, _emit)
    if _operation in (operator.add, operator.mul):
        _define(getattr(operator, f"i{_operation.__name__}"), _result, _emit)


for _operation, _emit in (
    (operator.and_, ir.IRBuilder.and_),
    (operator.or_, ir.IRBuilder.or_),
    (operator.iand, ir.IRBuilder.and_),
    (operator.ior, ir.IRBuilder.or_),
):
    _define_logic(_operation, _emit)


def _call(builder, name, result, *args):
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), args)


@intrinsic
def splat(typingctx, value):
    """The float32 `value` in all lanes."""
    return LANES(types.float32), lambda context, builder, signature, args: _splat(builder, *args)


@intrinsic
def select(typingctx, choose, yes, no):
    """Lane by lane: yes if choose else no."""
    return LANES(MASK, LANES, LANES), lambda context, builder, signature, args: builder.select(*args)


@intrinsic
def any_lane(typingctx, m):
    """Whether the mask is true in some lane."""

    def emit(context, builder, signature, args):
        return builder.icmp_unsigned("!=", builder.bitcast(args[0], ir.IntType(WIDTH)), ir.IntType(WIDTH)(0))

    return types.boolean(MASK), emit


def _unary(name):
    return lambda context, builder, signature, args: _call(builder, f"llvm.{name}.v{WIDTH}f32", _FLOATS, *args)


@intrinsic
def absolute(typingctx, v):
    """|v|."""
    return LANES(LANES), _unary("fabs")


@intrinsic
def root(typingctx, v):
    """Square root, exactly rounded."""
    return LANES(LANES), _unary("sqrt")


@intrinsic
def nearest_code(typingctx, v, lowest, highest):
    """`search.nearest` clamped to lowest..highest (int32), as floats; for any v: infinities and NaN give what the
    scalar gives."""

    def emit(context, builder, signature, args):
        v, lowest, highest = args
        bits = builder.bitcast(builder.fadd(v, _constant(_FLOATS, 12582912.0)), _INTS)
        q = builder.sub(builder.and_(bits, _constant(_INTS, 0x007FFFFF)), _constant(_INTS, 0x00400000))
        for symbol, bound in (("<", lowest), (">", highest)):
            limit = _spread(builder, bound)
            q = builder.select(builder.icmp_signed(symbol, q, limit), limit, q)
        return builder.sitofp(q, _FLOATS)

    return LANES(LANES, types.int32, types.int32), emit


def _pointer(context, builder, kind, place, vector):
    """Where `vector` lies in an array of numba type `kind`; place: array, flat index."""
    array, index = place
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _read(builder, pointer):
    value = builder.load(pointer)
    value.align = 4
    return value


def _is_flat(kind, dtype):
    return isinstance(kind, types.Array) and kind.layout == "C" and kind.dtype == dtype


@intrinsic
def load(typingctx, array, index):
    """array[index : index + 16], float32."""
    if not _is_flat(array, types.float32):
        return None

    def emit(context, builder, signature, args):
        return _read(builder, _pointer(context, builder, signature.args[0], args, _FLOATS))

    return LANES(array, types.intp), emit


@intrinsic
def store(typingctx, array, index, v):
    """array[index : index + 16] = v, float32."""
    if not _is_flat(array, types.float32):
        return None

    def emit(context, builder, signature, args):
        *place, v = args
        builder.store(v, _pointer(context, builder, signature.args[0], place, _FLOATS)).align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, LANES), emit


@intrinsic
def load_codes(typingctx, array, index, shift, keep):
    """array[index : index + 16] >> shift & keep, uint8 to float32."""
    if not _is_flat(array, types.uint8):
        return None

    def emit(context, builder, signature, args):
        *place, shift, keep = args
        codes = builder.load(_pointer(context, builder, signature.args[0], place, _BYTES))
        codes.align = 1
        codes = builder.lshr(builder.zext(codes, _INTS), _spread(builder, shift))
        return builder.sitofp(builder.and_(codes, _spread(builder, keep)), _FLOATS)

    return LANES(array, types.intp, types.int32, types.int32), emit


@intrinsic
def load_signed(typingctx, array, index):
    """array[index : index + 16], int8 to float32."""
    if not _is_flat(array, types.int8):
        return None

    def emit(context, builder, signature, args):
        codes = builder.load(_pointer(context, builder, signature.args[0], args, _BYTES))
        codes.align = 1
        return builder.sitofp(codes, _FLOATS)

    return LANES(array, types.intp), emit


@intrinsic
def load_bits(typingctx, array, index):
    """The 16 bits of array[index] and array[index + 1], uint8, from the low bit up, as 0.0 or 1.0."""
    if not _is_flat(array, types.uint8):
        return None

    def emit(context, builder, signature, args):
        word = builder.load(_pointer(context, builder, signature.args[0], args, ir.IntType(WIDTH)))
        word.align = 1
        return builder.uitofp(builder.bitcast(word, _BITS), _FLOATS)

    return LANES(array, types.intp), emit


@intrinsic
def store_codes(typingctx, array, index, v):
    """array[index : index + 16] = v truncated to int, uint8; v within -128..255."""
    if not (_is_flat(array, types.uint8) or _is_flat(array, types.int8)):
        return None

    def emit(context, builder, signature, args):
        *place, v = args
        codes = builder.trunc(builder.fptosi(v, _INTS), _BYTES)
        builder.store(codes, _pointer(context, builder, signature.args[0], place, _BYTES)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, LANES), emit


@intrinsic
def transpose(typingctx, x, start, stride, count, out, index):
    """out[index + 16 * j + l] = x[start + stride * l + j] for j, l in 0..15, float32; lanes from `count` on repeat the
    last one before, so that nothing is read behind it."""
    if not (_is_flat(x, types.float32) and _is_flat(out, types.float32)):
        return None

    def emit(context, builder, signature, args):
        x, start, stride, count, out, index = args
        last = builder.sub(count, count.type(1))
        rows = []
        for lane in range(WIDTH):
            number = count.type(lane)
            row = builder.select(builder.icmp_signed("<", number, last), number, last)
            at = builder.add(start, builder.mul(stride, row))
            rows.append(_read(builder, _pointer(context, builder, signature.args[0], (x, at), _FLOATS)))
        # four rounds of interleaving row i with row i + 8 carry element j of row l to element l of row j
        halves = [
            ir.Constant(_INTS, [base + k // 2 + WIDTH * (k % 2) for k in range(WIDTH)]) for base in (0, WIDTH // 2)
        ]
        for _ in range(4):
            pairs = zip(rows[: WIDTH // 2], rows[WIDTH // 2 :], strict=True)
            rows = [builder.shuffle_vector(a, b, half) for a, b in pairs for half in halves]
        for j, row in enumerate(rows):
            at = builder.add(index, index.type(WIDTH * j))
            builder.store(row, _pointer(context, builder, signature.args[4], (out, at), _FLOATS)).align = 4
        return context.get_dummy_value()

    size = types.intp
    return types.void(x, size, size, size, out, size), emit
