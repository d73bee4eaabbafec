"""Where tensor headers live: an arena that counts what they take, and gives up all of them at once.

Usually a context holds headers only (`no_alloc`): weights stay in the file's memory map, intermediates get their place
from the allocator. With `no_alloc=False` each tensor's data follow its header in the same pool, which suits small
examples. Nothing in an arena can be freed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.errors import EngineError
from engine.tensor import Tensor
from quant import Format

MEM_ALIGN = 16  # bytes, of everything in an arena
OBJECT_SIZE = 32  # bytes of an entry in the arena's list
HEADER_SIZE = 336  # bytes of a tensor header, as in ggml
TENSOR_OVERHEAD = OBJECT_SIZE + HEADER_SIZE
BUFFER_ALIGN = 64  # bytes, of tensors in a buffer: a cache line


@dataclass(frozen=True)
class Entry:
    """What the arena holds: `offset` and `size` in bytes, behind the entry's own OBJECT_SIZE bytes."""

    offset: int
    size: int
    kind: str  # tensor, data, graph
    what: object = None


class Context:
    """An arena of `mem_size` bytes. Exhaustion raises EngineError, as does the arena's own size if it is not positive.

    Allocation moves the end of the used part; `reset` forgets everything.
    """

    def __init__(self, mem_size: int = 16 << 20, no_alloc: bool = True):
        if mem_size < 1:
            raise EngineError(f"a context of {mem_size} bytes can hold nothing; ask for {TENSOR_OVERHEAD} or more")
        self.mem_size = mem_size
        self.no_alloc = no_alloc
        self.entries: list[Entry] = []
        self.tensors: list[Tensor] = []
        self.used = 0
        self._pool: np.ndarray | None = None

    def take(self, size: int, kind: str, what: object = None) -> int:
        """Reserve `size` bytes and a list entry; returns the offset of the bytes."""
        padded = -(-size // MEM_ALIGN) * MEM_ALIGN
        if self.used + OBJECT_SIZE + padded > self.mem_size:
            raise EngineError(
                f"context full: a {kind} needs {OBJECT_SIZE + padded:,} bytes, {self.mem_size - self.used:,} of "
                f"{self.mem_size:,} are left; make the context larger"
            )
        offset = self.used + OBJECT_SIZE
        self.entries.append(Entry(offset, padded, kind, what))
        self.used = offset + padded
        return offset

    def add(self, tensor: Tensor) -> Tensor:
        """Take a header into the arena, and unless `no_alloc` room for its data."""
        self.take(HEADER_SIZE, "tensor", tensor)
        self.tensors.append(tensor)
        if not self.no_alloc:
            self._give_data(tensor)
        return tensor

    def tensor(self, format: Format, *ne: int, name: str = "") -> Tensor:
        """A new contiguous leaf of `ne` elements, axis 0 first."""
        if any(n < 0 for n in ne) or not 1 <= len(ne) <= 4:
            raise EngineError(f"a tensor of shape {list(ne)} is not possible: one to four sizes, none negative")
        return self.add(Tensor(format, ne, name=name))

    def reset(self) -> None:
        """Forget all entries."""
        self.entries.clear()
        self.tensors.clear()
        self.used = 0

    def _give_data(self, tensor: Tensor) -> None:
        if tensor.view_src is not None:
            root = tensor.view_src
            if root.buffer is not None:
                tensor.bind(root.buffer, root.offset + tensor.view_offs)
            return
        offset = self.take(tensor.nbytes, "data", tensor)
        if self._pool is None:
            self._pool = aligned(self.mem_size)
        tensor.bind(self._pool, offset)


def aligned(size: int) -> np.ndarray:
    """`size` zero bytes that begin at a cache line."""
    raw = np.zeros(size + BUFFER_ALIGN, np.uint8)
    start = -raw.ctypes.data % BUFFER_ALIGN
    return raw[start : start + size]


def allocate(ctx: Context, backend: str | None = None) -> np.ndarray:
    """Move a context's tensors from headers to memory: one buffer for all that have none yet, side by side; views
    follow their roots. backend: the name of the backend that owns the memory. Returns the buffer."""
    bare = [t for t in ctx.tensors if t.buffer is None and t.view_src is None]
    sizes = [-(-t.nbytes // BUFFER_ALIGN) * BUFFER_ALIGN for t in bare]
    buffer = aligned(sum(sizes))
    offset = 0
    for tensor, size in zip(bare, sizes):
        tensor.bind(buffer, offset)
        tensor.backend = backend
        offset += size
    for tensor in ctx.tensors:
        root = tensor.view_src
        if root is not None and tensor.buffer is None and root.buffer is not None:
            tensor.bind(root.buffer, root.offset + tensor.view_offs)
            tensor.backend = root.backend
    return buffer
