"""The table of ops: allocator and backends ask it. A new op is one entry in its family's file."""

from engine.ops import attn, elementwise, gather, matmul, norm, rotary, views
from engine.ops.op import Op

#: name -> Op
OPS: dict[str | None, Op] = {
    op.name: op for family in (views, elementwise, norm, rotary, gather, matmul, attn) for op in family.OPS
}
