"""Models on the Hugging Face hub: a folder of what conversion needs, and nothing else.

Small files are downloaded. Of weights, first only the headers are read (by ranges of bytes), and stand in for the
files: everything that can be refused is refused before gigabytes move. Then the files with tensors of the language
model are downloaded into the hub's own cache, where an interrupted download goes on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gguftools.conversion.layouts import text_views
from gguftools.errors import GGUFError
from gguftools.quantizing.assemble import Progress, silent
from gguftools.safetensors import ADAPTER, SafetensorsFile

_REPO = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
#: names of small files that say something about a model
_SMALL = re.compile(r"(additional_chat_templates/)?[\w.-]+\.(json|jinja|model|txt|jsonl)|README\.md|merges\.txt")
_WEIGHTS = re.compile(r"[\w.-]+\.safetensors")


def local_name(repo: str) -> str:
    """Name of the output: `org-name-{ftype}.gguf`."""
    return repo.replace("/", "-") + "-{ftype}.gguf"


@contextmanager
def fetched(
    repo: str,
    revision: str | None = None,
    weights: bool = True,
    progress: Progress = silent,
    endpoint: str | None = None,
) -> Iterator[Path]:
    """A folder with the files of `org/name`; it vanishes when the block ends.

    weights: whether tensors will be read; endpoint: another address than the hub's. Raises GGUFError if the library
    is not installed, for names that are none, and for what the hub answers.
    """
    if not _REPO.fullmatch(repo):
        raise GGUFError(f"'{repo}' is no name of a model on the hub; write it as organization/name")
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise GGUFError("--remote needs huggingface_hub; install gguftools[hub]") from None
    api = HfApi(endpoint=endpoint)
    commit, names = _asked(repo, lambda: _listed(api, repo, revision))
    with tempfile.TemporaryDirectory(prefix="gguftools-") as scratch:
        folder = Path(scratch, *repo.split("/"))
        folder.mkdir(parents=True)

        def download(name: str) -> Path:
            return Path(_asked(repo, lambda: api.hf_hub_download(repo, name, revision=commit)))

        def header(name: str) -> Any:
            return _asked(repo, lambda: api.parse_safetensors_file_metadata(repo, name, revision=commit))

        for name in names:
            if _SMALL.fullmatch(name):
                _place(download(name), folder / name)
        files = _weights(folder, [name for name in names if _WEIGHTS.fullmatch(name)])
        if not files and not (folder / "config.json").is_file():
            raise GGUFError(f"{repo}: has neither config.json nor *.safetensors; is it a model?")
        for name in files:
            _stand_in(folder / name, header(name))
        if weights:
            from gguftools.conversion.run import plan

            plan(folder)
            needed = [name for name in files if _holds_text(folder, name)]
            with progress("downloading", sum((folder / name).stat().st_size for name in needed)) as advance:
                for name in needed:
                    size = (folder / name).stat().st_size
                    _place(download(name), folder / name)
                    advance(size)
        yield folder


def _asked(repo: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except GGUFError:
        raise
    except Exception as error:  # the library's errors have many classes, of several other libraries
        text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise GGUFError(f"{repo}: {text.strip()}") from None


def _listed(api: Any, repo: str, revision: str | None) -> tuple[str, list[str]]:
    """Commit and names of all files."""
    info = api.model_info(repo, revision=revision)
    return info.sha, sorted(sibling.rfilename for sibling in info.siblings or ())


def _weights(folder: Path, names: list[str]) -> list[str]:
    """Files of weights that `open_checkpoint` would read."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        from gguftools.safetensors import _weight_map

        wanted = set(_weight_map(indexes[0]).values())
        missing = sorted(wanted - set(names))
        if missing:
            raise GGUFError(f"{folder.name}: {indexes[0].name} lists '{missing[0]}', which is not on the hub")
        return sorted(wanted)
    names = [name for name in names if name != ADAPTER]
    plain = [name for name in names if not name.startswith("consolidated")]
    return plain if any(name.startswith("model") for name in plain) else names


def _place(source: Path, target: Path) -> None:
    """A link to a file of the cache, or a copy where links cannot be made."""
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        target.symlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, target)


def _stand_in(path: Path, found: Any) -> None:
    """A file with the header that was read and a hole for the tensors."""
    entries = {
        name: {"dtype": str(t.dtype), "shape": list(t.shape), "data_offsets": list(t.data_offsets)}
        for name, t in found.tensors.items()
    }
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        try:
            os.truncate(file.fileno(), 8 + len(text) + end)
        except (OSError, OverflowError):
            raise GGUFError(f"{path.name}: the header names {end:,} bytes of tensors; the file is damaged") from None


def _holds_text(folder: Path, name: str) -> bool:
    """Whether a file holds tensors of the language model."""
    views = list(SafetensorsFile(folder / name).tensors.values())
    try:
        return bool(text_views(folder, views)) or not views
    except GGUFError:
        return False
