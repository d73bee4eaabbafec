"""A GGUF file in, a Hugging Face folder out: safetensors, config.json, the vocabulary, generation_config.json."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.models import get_arch
from gguftools.conversion.card import write_card
from gguftools.conversion.transforms import Rows
from gguftools.errors import GGUFError, naming
from gguftools.exporting.config import config_of, generation_config_of
from gguftools.exporting.folder import Item, write_checkpoint
from gguftools.exporting.tensors import checkpoint
from gguftools.exporting.vocabulary import vocabulary_of
from gguftools.toolbox.shards import open_set

#: type of the weights -> PyTorch's name
OUTTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_SHARD = 5 * 10**9  # bytes
_SMALL = 1 << 24  # weights of tensors that are looked at as a whole


@dataclass(frozen=True)
class Exported:
    """What was done: the folder, its files, the model's class and the type of its weights, tensors with their types."""

    folder: Path
    files: tuple[str, ...]
    model_class: str
    dtype: str
    tensors: dict[str, str]
    n_bytes: int

    def summary(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "output": str(self.folder),
            "files": list(self.files),
            "class": self.model_class,
            "dtype": self.dtype,
            "tensors": len(self.tensors),
            "bytes": self.n_bytes,
        }


def export(
    source: str | os.PathLike,
    output: str | os.PathLike,
    outtype: str = "auto",
    max_shard_size: int = MAX_SHARD,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
    dry_run: bool = False,
) -> Exported:
    """Write a GGUF model as a Hugging Face folder; converting that gives the same tensors again.

    output: a folder that does not exist yet, or is empty; outtype: f32, f16 or bf16, or auto: that of the file's
    matrices, F16 for quantized ones; max_shard_size: bytes of a file of weights; dry_run: plan and report only.

    >>> import gguftools, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = gguftools.export(gguftools.demo_model(), os.path.join(folder, "tiny"))
    >>> done.model_class, done.dtype, done.files[0]
    ('LlamaForCausalLM', 'bfloat16', 'model.safetensors')

    Raises GGUFError, EngineError and QuantError for files that are damaged or of unknown families, for what a
    checkpoint has no form for, and for weights that do not fit the type; then no folder is left behind.
    """
    if outtype.upper() not in OUTTYPES and outtype != "auto":
        raise GGUFError(f"unknown outtype '{outtype}'; there are {', '.join(OUTTYPES).lower()} and auto")
    if max_shard_size < 1:
        raise GGUFError("the size of a shard must be 1 byte or more")
    folder = Path(output)
    _check_folder(folder)
    with open_set(source) as model, naming(source), _names(source):
        arch = get_arch(model.metadata.get("general.architecture"))
        h = arch.read_hparams(model.metadata)
        if getattr(h, "n_vocab", 0) is None:
            h.n_vocab = len(model.metadata.get("tokenizer.ggml.tokens", ()))
        rows = checkpoint(model.tensors, arch, h)
        target = _type_of(rows) if outtype == "auto" else outtype.upper()
        items = [Item(name, one, _stored(one, target, outtype == "auto")) for name, one in rows.items()]
        config = config_of(model.metadata, model.tensors, arch, h, OUTTYPES[target])
        files = vocabulary_of(model.metadata) | {"config.json": config}
        files["generation_config.json"] = generation_config_of(model.metadata)
        files["README.md"] = write_card(model.metadata).encode()
        done: tuple[str, ...] = ()
        if not dry_run:
            with _scratch(folder) as scratch:
                done = tuple(write_checkpoint(scratch, items, max_shard_size, threads, progress))
                for name, content in files.items():
                    _write(scratch / name, content)
                _check_again(scratch, model.metadata, set(model.tensors))
    return Exported(
        folder,
        (*done, *files),
        config["architectures"][0],
        OUTTYPES[target],
        {item.name: item.dtype for item in items},
        sum(item.n_bytes for item in items),
    )


@contextmanager
def _names(source: str | os.PathLike) -> Iterator[None]:
    """Errors of ours that name no file yet leave the block with the source's name in front."""
    try:
        yield
    except GGUFError as error:
        text = str(error)
        raise (
            error
            if ": " in text and Path(text.partition(": ")[0]).exists()
            else GGUFError(f"{os.fspath(source)}: {text}")
        ) from None


def _check_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise GGUFError(f"{folder}: is there already, and is not overwritten; remove it or choose another name")
    if not folder.absolute().parent.is_dir():
        raise GGUFError(f"{folder}: the folder {folder.absolute().parent} does not exist; make it first")


def _type_of(rows: dict[str, Rows]) -> str:
    """The type of most weights of matrices; F16 for quantized ones."""
    counts: Counter[str] = Counter()
    for one in rows.values():
        if len(one.shape) > 1:
            counts[one.dtype] += one.n_rows * one.n
    kind = counts.most_common(1)[0][0] if counts else "F32"
    return kind if kind in OUTTYPES else "F16"


def _stored(rows: Rows, target: str, exactly: bool) -> str:
    """The type that a tensor is stored in: the target, unless that would lose something of a small float32 one."""
    if not exactly or rows.dtype != "F32" or target == "F32":
        return target
    if rows.n_rows * rows.n > _SMALL:
        return "F32"
    values = rows.read(0, rows.n_rows, 1)
    if target == "F16":
        with np.errstate(over="ignore"):
            same = np.array_equal(values.astype(np.float16).astype(np.float32), values)
    else:
        same = not np.any(values.view(np.uint32) & 0xFFFF)
    return target if same else "F32"


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder that takes the name of `folder` when the block ends, and vanishes if it fails."""
    parent = folder.absolute().parent
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=parent))
    try:
        yield scratch
        scratch.chmod(0o777 & ~_umask())
        if folder.exists():
            folder.rmdir()
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def _write(path: Path, content: bytes | dict[str, Any]) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


#: keys of a vocabulary that must come back
_SAME = ("model", "tokens", "token_type", "scores", "merges", "pre", "bos_token_id", "eos_token_id", "add_bos_token")


def _check_again(folder: Path, metadata: Any, tensors: set[str]) -> None:
    """Raises GGUFError unless converting the folder would give the same tensors and vocabulary."""
    from gguftools.conversion.run import plan

    again = plan(folder, pre=metadata.get("tokenizer.ggml.pre") if metadata["tokenizer.ggml.model"] == "gpt2" else None)
    names = {item.name for item in again.items}
    if names != tensors:
        raise GGUFError(f"tensor '{sorted(names ^ tensors)[0]}' would not come back; the model cannot be exported")
    keys = dict(again.keys)
    for name in _SAME:
        key = f"tokenizer.ggml.{name}"
        if key in metadata and not _equal(metadata[key], keys.get(key)):
            raise GGUFError(f"key '{key}' would not come back as it is; the vocabulary cannot be exported")


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, (str, bool, int, float)) or new is None:
        return bool(old == new)
    return len(old) == len(new) and all(a == b for a, b in zip(old, new))
