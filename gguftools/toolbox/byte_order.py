"""A model file in the other byte order: keys, sizes, and every number inside the blocks of every type."""

from __future__ import annotations

import os

from gguftools.errors import GGUFError
from gguftools.gguf import GGUF
from gguftools.gguf.endian import NAMES, byte_order
from gguftools.toolbox.copying import Progress, part, write


def convert_endian(
    source: str | os.PathLike, output: str | os.PathLike, order: str, progress: Progress = None
) -> tuple[str, str]:
    """Write `source` in the byte order `big`, `little` or `native`. Returns the orders before and after.

    >>> import gguftools, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gguftools.convert_endian(gguftools.demo_model(), os.path.join(folder, "big.gguf"), "big")
    ('little', 'big')

    Raises GGUFError for an unknown order, a file that has it already, and as the reader and writer do.
    """
    target = byte_order(order)
    with GGUF(source) as f:
        if f.byte_order == target:
            raise GGUFError(f"{source}: is {NAMES[target]}-endian already; there is nothing to do")
        parts = [part(t) for t in f.tensors.values()]
        write(output, [source], f.fields.values(), parts, progress, target, version=f.version)
        return NAMES[f.byte_order], NAMES[target]
