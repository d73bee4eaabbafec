"""A context's memory as plain mappings, to be written to a file and read again: keys, values and states as they are
kept, and the books of the cells in use. Empty cells take no room."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine.cache.kv import KVCache
from engine.cache.memory import CacheMemory
from engine.errors import EngineError
from engine.ops.op import F32
from engine.tensor import Tensor
from quant import Format

VERSION = 1
_PREFIX = "session."


class Stored(NamedTuple):
    """Rows of one tensor: NumPy shape, format, and the bytes."""

    shape: tuple[int, ...]
    format: Format
    data: np.ndarray


class StoredView(Protocol):
    """The same, as a file gives it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> Format: ...
    @property
    def data(self) -> np.ndarray: ...


def fingerprint(memory: CacheMemory, model: str) -> str:
    """What must agree between the memory that is saved and the one that it is restored to: layers and types."""
    parts: list[Any] = [model]
    for cache in memory.caches:
        layers = [(i, a.d_k, a.d_v, a.n_head_kv) for i, a in sorted(cache.layers.items())]
        parts.append((str(cache.type_k), str(cache.type_v), layers))
    if memory.states is not None:
        parts.append(sorted((*key, ne) for key, ne in memory.states.shapes.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def save(memory: CacheMemory, model: str, tokens: Sequence[int]) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Metadata and tensors of what is in memory. model: names the weights; tokens: the text of it, for whoever reads it
    again. Keys that were moved must have been rotated (`ModelContext.update`)."""
    metadata: dict[str, Any] = {
        _PREFIX + "version": VERSION,
        _PREFIX + "fingerprint": fingerprint(memory, model),
        _PREFIX + "tokens": [int(t) for t in tokens],
    }
    tensors: dict[str, Stored] = {}
    for number, cache in enumerate(memory.caches):
        at = [(s, int(i)) for s, cells in enumerate(cache.streams) for i in np.flatnonzero(cells.pos >= 0)]
        key = f"{_PREFIX}cache.{number}."
        owned = [(n, int(q)) for n, (s, i) in enumerate(at) for q in np.flatnonzero(cache.streams[s].owners[:, i])]
        metadata[key + "positions"] = [int(cache.streams[s].pos[i]) for s, i in at]
        metadata[key + "owned_cells"] = [cell for cell, _ in owned]
        metadata[key + "owners"] = [seq for _, seq in owned]
        if at:
            streams, cells_at = map(np.array, zip(*at))
            for i in cache.layers:
                for which, tensor in (("k", cache.k[i]), ("v", cache.v[i])):
                    rows = _rows(tensor)[streams, cells_at]
                    tensors[f"{which}.{i}"] = Stored((len(at), tensor.ne[0]), tensor.format, rows.reshape(-1))
    if memory.states is not None:
        metadata[_PREFIX + "states"] = [int(p) for p in memory.states.pos]
        for (layer, name), tensor in memory.states.tensors.items():
            stored = Stored((tensor.ne[1], tensor.ne[0]), F32, tensor.raw().copy())
            tensors[f"state.{layer}.{name}"] = stored
    return metadata, tensors


def restore(
    memory: CacheMemory, model: str, metadata: Mapping[str, Any], tensors: Mapping[str, StoredView]
) -> list[int]:
    """Put what `save` gave into a memory, which forgets what it had; returns the tokens. Raises EngineError, and
    changes nothing, for another model or other cache types, for more than there is room for, and for damaged data."""
    if metadata.get(_PREFIX + "version") != VERSION:
        raise EngineError(f"no saved session, or one of another version than {VERSION}")
    if metadata.get(_PREFIX + "fingerprint") != fingerprint(memory, model):
        raise EngineError("the session was saved by another model, or with other types of the cache (-ctk, -ctv)")
    tokens = _numbers(metadata, "tokens", 1 << 31)
    plans = [_plan(memory, number, metadata) for number in range(len(memory.caches))]
    for cache, (places, _, _) in zip(memory.caches, plans):
        for i in cache.layers if places else ():
            for which, tensor in (("k", cache.k[i]), ("v", cache.v[i])):
                _check(tensors, f"{which}.{i}", (len(places), tensor.ne[0]), tensor.format)
    seen: np.ndarray | None = None
    if memory.states is not None:
        seen = np.array(_numbers(metadata, "states", 1 << 31, least=-1), np.int32)
        for (layer, name), tensor in memory.states.tensors.items():
            _check(tensors, f"state.{layer}.{name}", (len(seen), tensor.ne[0]), F32)
        if len(seen) > memory.n_seq_max:
            raise EngineError(f"the session has {len(seen)} sequences, the context {memory.n_seq_max} (n_seq_max)")
    memory.clear()
    for cache, (places, positions, owners) in zip(memory.caches, plans):
        _fill(cache, places, positions, owners, tensors)
    if memory.states is not None and seen is not None:
        memory.states.pos[: len(seen)] = seen
        for (layer, name), tensor in memory.states.tensors.items():
            rows = np.asarray(tensors[f"state.{layer}.{name}"].data).reshape(-1).view(np.float32)
            tensor.array()[0, 0, : len(seen)] = rows.reshape(len(seen), -1)
    return tokens


def _plan(
    memory: CacheMemory, number: int, metadata: Mapping[str, Any]
) -> tuple[list[tuple[int, int]], list[int], list[list[int]]]:
    """(stream and cell, position, owners) of every stored cell."""
    cache = memory.caches[number]
    key = f"cache.{number}."
    positions = _numbers(metadata, key + "positions", 1 << 31)
    owners: list[list[int]] = [[] for _ in positions]
    cells = _numbers(metadata, key + "owned_cells", max(1, len(positions)))
    seqs = _numbers(metadata, key + "owners", 1 << 31)
    if len(cells) != len(seqs):
        raise EngineError("the session is damaged: its cells and their owners do not agree")
    for cell, seq in zip(cells, seqs):
        if seq >= memory.n_seq_max:
            raise EngineError(f"the session has a sequence {seq}, the context {memory.n_seq_max} (n_seq_max)")
        owners[cell].append(seq)
    filled = [0] * cache.n_stream
    places = []
    for of in owners:
        if not of:
            raise EngineError("the session is damaged: a cell belongs to no sequence")
        if len(of) > 1 and not cache.unified:
            raise EngineError("the session's sequences share tokens: restore it to a context with kv_unified")
        stream = cache.stream_of(of[0])
        places.append((stream, filled[stream]))
        filled[stream] += 1
    if max(filled, default=0) > cache.n_cells:
        raise EngineError(
            f"the session has {max(filled)} tokens, the cache room for {cache.n_cells}: use a larger context (-c)"
        )
    return places, positions, owners


def _fill(
    cache: KVCache,
    places: list[tuple[int, int]],
    positions: list[int],
    owners: list[list[int]],
    tensors: Mapping[str, StoredView],
) -> None:
    if not places:
        return
    for (stream, cell), pos, of in zip(places, positions, owners):
        cells = cache.streams[stream]
        cells.pos[cell] = pos
        cells.owners[of, cell] = True
        cells.head = (cell + 1) % cells.size
    streams, cells_at = map(np.array, zip(*places))
    for i in cache.layers:
        for which, tensor in (("k", cache.k[i]), ("v", cache.v[i])):
            data = np.asarray(tensors[f"{which}.{i}"].data).reshape(len(places), -1)
            _rows(tensor)[streams, cells_at] = data


def _rows(tensor: Tensor) -> np.ndarray:
    """The bytes of a cache's rows: uint8 [n_stream, n_cells, bytes of a row]."""
    return tensor.raw().reshape(tensor.ne[2], tensor.ne[1], tensor.nb[1])


def _numbers(metadata: Mapping[str, Any], key: str, limit: int, least: int = 0) -> list[int]:
    found = metadata.get(_PREFIX + key)
    values = np.asarray([] if found is None else found)
    if found is None or values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise EngineError(f"the session is damaged: '{_PREFIX}{key}' is no list of whole numbers")
    if values.size and not least <= int(values.min()) <= int(values.max()) < limit:
        raise EngineError(f"the session is damaged: a number in '{_PREFIX}{key}' is out of range")
    return [int(v) for v in values]


def _check(tensors: Mapping[str, StoredView], name: str, shape: tuple[int, ...], format: Format) -> None:
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape or found.format is not format:
        raise EngineError(f"the session is damaged: '{name}' is missing, or not {format} {list(shape)}")
    assert found.data.nbytes == math.prod(shape) // format.block_size * format.type_size, name
