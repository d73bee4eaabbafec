"""Fingerprints of weights, tensor by tensor and in total, in the manifest of llama.cpp's gguf-hash.

They cover the tensors' data alone, so editing keys does not change them. A total depends on the order of the tensors,
unless it is asked not to: then it is that of the tensors sorted by name. xxh64, gguf-hash's quick one, is made here
with the package `xxhash`, if it is installed.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from gguftools.errors import GGUFError
from gguftools.toolbox.copying import Progress, pieces
from gguftools.toolbox.shards import open_set

NAMESPACE = uuid.UUID("ef001206-dadc-5f6d-a15f-3359e577d4e5")  # gguf-hash's
#: constants of old checkpoints, which gguf-hash leaves out
SKIPPED = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")

ALGORITHMS = ("xxh64", "sha1", "sha256", "uuid")


@dataclass(frozen=True)
class Hash:
    """One line of a manifest; tensor: "" for the total."""

    algorithm: str
    digest: str
    tensor: str

    def line(self, file: str) -> str:
        """As gguf-hash writes it."""
        return f"{self.algorithm:<8}  {self.digest}  {file}" + (f":{self.tensor}" if self.tensor else "")


def hash_file(
    path: str | os.PathLike,
    algorithms: Sequence[str] = ("sha256",),
    layers: bool = True,
    any_order: bool = False,
    progress: Progress = None,
) -> list[Hash]:
    """Hashes of every tensor (`layers`), then of the whole.

    algorithms: of ALGORITHMS, `uuid` for the whole only; any_order: tensors sorted by name; progress: called with
    bytes.

    >>> import gguftools
    >>> [h.algorithm for h in gguftools.hash(gguftools.demo_model(), ["sha1", "uuid"], layers=False)]
    ['sha1', 'uuid']

    Raises GGUFError for an unknown algorithm, and as the reader does.
    """
    unknown = [name for name in algorithms if name not in ALGORITHMS]
    if unknown:
        raise GGUFError(f"unknown hash '{unknown[0]}'; there are {', '.join(ALGORITHMS)}")
    chosen = [name for name in ALGORITHMS if name in algorithms]
    with open_set(path) as model:
        views = [view for view in model.tensors.values() if not view.name.endswith(SKIPPED)]
        views = sorted(views, key=lambda view: view.name) if any_order else views
        totals = {name: _new(name) for name in chosen}
        if "uuid" in totals:
            totals["uuid"].update(NAMESPACE.bytes)
        found = []
        for view in views:
            own = {name: _new(name) for name in chosen if name != "uuid"} if layers else {}
            for piece in pieces(view):
                for state in (*totals.values(), *own.values()):
                    state.update(piece.data)
                if progress is not None:
                    progress(piece.nbytes)
            found += [Hash(name, state.hexdigest(), view.name) for name, state in own.items()]
    return found + [Hash(name, _digest(name, state), "") for name, state in totals.items()]


def _new(algorithm: str) -> Any:
    if algorithm == "xxh64":
        try:
            return import_module("xxhash").xxh64()
        except ImportError:
            raise GGUFError("xxh64 needs the package xxhash: `pip install xxhash`, or use --sha256") from None
    return hashlib.sha1() if algorithm == "uuid" else hashlib.new(algorithm)


def _digest(algorithm: str, state: Any) -> str:
    if algorithm != "uuid":
        return state.hexdigest()
    return str(uuid.UUID(bytes=state.digest()[:16], version=5))


@dataclass(frozen=True)
class Compared:
    """One line of a manifest against the file. verdict: `Ok`, `Mismatch`, `Not Found` (in the
    manifest), or `Missing` (in the file)."""

    hash: Hash
    verdict: str


def read_manifest(path: str | os.PathLike) -> dict[tuple[str, str], str]:
    """(algorithm, tensor) -> digest; tensor "" is the whole file. The file's own name in the manifest does not count.

    Raises GGUFError for a file that cannot be read or has no line of a manifest.
    """
    found = {}
    for algorithm, digest, name in _lines(Path(path)):
        tensor = name.rpartition(".gguf:")[2] if ".gguf:" in name else name.partition(":")[2]
        found[algorithm, tensor] = digest.lower()
    if not found:
        raise GGUFError(f"{path}: holds no hashes; make a manifest with `gguftools hash MODEL > MANIFEST`")
    return found


def _lines(path: Path) -> Iterator[list[str]]:
    try:
        text = path.read_text("utf-8", "surrogateescape")
    except OSError as error:
        raise GGUFError(f"{path}: cannot be read: {error.strerror}") from None
    for line in text.splitlines():
        parts = line.split(maxsplit=2)
        if len(parts) == 3 and parts[0] in ALGORITHMS:
            yield parts


def compare_manifest(
    path: str | os.PathLike,
    manifest: str | os.PathLike,
    algorithms: Sequence[str] = (),
    any_order: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Compared]:
    """The file's hashes against those of a manifest.

    algorithms: those to compare; none means the strongest that the manifest has.
    """
    wanted = read_manifest(manifest)
    known = {algorithm for algorithm, _ in wanted}
    chosen = list(algorithms) or [next(a for a in ("sha256", "sha1", "xxh64", "uuid") if a in known)]
    layers = any(tensor for _, tensor in wanted)
    found = hash_file(path, chosen, layers, any_order, progress)
    compared = [Compared(h, _verdict(wanted.pop((h.algorithm, h.tensor), None), h.digest)) for h in found]
    lost = [Hash(a, digest, tensor) for (a, tensor), digest in wanted.items() if a in chosen]
    return compared + [Compared(h, "Missing") for h in lost]


def _verdict(wanted: str | None, found: str) -> str:
    if wanted is None:
        return "Not Found"
    return "Ok" if wanted == found else "Mismatch"
