"""Where tensor headers live: an arena that counts what they would take and gives up all of them at once.

A context never holds data: weights stay in the file's memory map, intermediates get their place from the allocator.
"""

from __future__ import annotations

from engine.errors import EngineError
from engine.tensor import Tensor
from quant import Format

TENSOR_OVERHEAD = 368  # bytes of one header with its list entry, as in ggml


class Context:
    """An arena of headers. `mem_size` (bytes) bounds their number; exhaustion raises EngineError."""

    def __init__(self, mem_size: int = 16 << 20):
        self.mem_size = mem_size
        self.tensors: list[Tensor] = []

    @property
    def used(self) -> int:
        """Bytes taken by the headers so far."""
        return len(self.tensors) * TENSOR_OVERHEAD

    def add(self, tensor: Tensor) -> Tensor:
        """Take a header into the arena."""
        if self.used + TENSOR_OVERHEAD > self.mem_size:
            raise EngineError(
                f"context full: a header needs {TENSOR_OVERHEAD} bytes, "
                f"{self.mem_size - self.used} of {self.mem_size} are left"
            )
        self.tensors.append(tensor)
        return tensor

    def tensor(self, format: Format, *ne: int, name: str = "") -> Tensor:
        """A new contiguous leaf of `ne` elements, axis 0 first."""
        return self.add(Tensor(format, ne, name=name))

    def reset(self) -> None:
        """Forget all headers."""
        self.tensors.clear()
