"""The table of ops: allocator and backends ask it. A new op is one entry in its family's file."""

from engine.ops import attn, copies, elementwise, gather, matmul, norms, recurrent, reduce, rotary, softmax, views
from engine.ops.op import Op
from engine.tensor import Tensor

#: name -> Op
OPS: dict[str | None, Op] = {
    op.name: op
    for family in (views, elementwise, norms, reduce, copies, rotary, gather, matmul, softmax, attn, recurrent)
    for op in family.OPS
}


def label(node: Tensor) -> str:
    """The op and its variant, for people: `GLU swiglu`; `leaf` for a leaf."""
    if node.op is None:
        return "leaf"
    variant = OPS[node.op].label
    return f"{node.op} {variant(node)}" if variant else node.op
