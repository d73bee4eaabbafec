"""The table of model families. A new one is one file in this folder and one entry here."""

from engine.errors import EngineError
from engine.models.arch import Arch
from engine.models.granite import GRANITE
from engine.models.granitehybrid import GRANITEHYBRID
from engine.models.llama import LLAMA
from engine.models.mamba import MAMBA
from engine.models.minimax_m2 import MINIMAX_M2
from engine.models.nemotron_h import NEMOTRON_H, NEMOTRON_H_MOE
from engine.models.olmo2 import OLMO2
from engine.models.olmoe import OLMOE
from engine.models.qwen2 import QWEN2, QWEN2MOE
from engine.models.qwen3 import QWEN3, QWEN3MOE
from engine.models.qwen3next import QWEN3NEXT
from engine.models.qwen35 import QWEN35, QWEN35MOE
from engine.models.seed_oss import SEED_OSS
from engine.models.smollm3 import SMOLLM3
from engine.models.stablelm import STABLELM

_ALL = (
    GRANITE,
    GRANITEHYBRID,
    LLAMA,
    MAMBA,
    MINIMAX_M2,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    OLMO2,
    OLMOE,
    QWEN2,
    QWEN2MOE,
    QWEN3,
    QWEN35,
    QWEN35MOE,
    QWEN3MOE,
    QWEN3NEXT,
    SEED_OSS,
    SMOLLM3,
    STABLELM,
)

#: `general.architecture` -> family
ARCHS: dict[str, Arch] = {arch.name: arch for arch in _ALL}


def get_arch(name: object) -> Arch:
    """The family called `name`. Raises EngineError that lists what there is."""
    if not isinstance(name, str) or name not in ARCHS:
        raise EngineError(f"unknown model architecture: {name!r}; this version has: {', '.join(ARCHS)}")
    return ARCHS[name]


def arch_of_config(config: dict) -> Arch:
    """The family of a Hugging Face config.json. Raises EngineError that lists what there is."""
    names = config.get("architectures")
    names = names if isinstance(names, list) else []
    for arch in ARCHS.values():
        if any(name in arch.hf_names for name in names) and arch.fits(config):
            return arch
    known = ", ".join(name for arch in ARCHS.values() for name in arch.hf_names)
    raise EngineError(
        f"unsupported model class {', '.join(map(str, names)) or '(none named)'}; this version has: {known}"
    )
