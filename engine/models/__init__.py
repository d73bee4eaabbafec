"""The table of model families. A new one is one file in this folder and one entry here."""

from engine.errors import EngineError
from engine.models.apertus import APERTUS
from engine.models.arch import Arch
from engine.models.bert import BERT
from engine.models.command_r import COHERE2, COMMAND_R
from engine.models.deepseek2 import DEEPSEEK2
from engine.models.ernie4_5 import ERNIE4_5
from engine.models.exaone4 import EXAONE4
from engine.models.falcon import FALCON
from engine.models.falcon_h1 import FALCON_H1
from engine.models.gemma import GEMMA, GEMMA2, GEMMA3
from engine.models.gemma4 import GEMMA4
from engine.models.glm4 import GLM4
from engine.models.glm4moe import GLM4MOE
from engine.models.gpt2 import GPT2
from engine.models.gpt_oss import GPT_OSS
from engine.models.gptneox import GPTNEOX
from engine.models.granite import GRANITE
from engine.models.granitehybrid import GRANITEHYBRID
from engine.models.hunyuan_dense import HUNYUAN_DENSE
from engine.models.lfm2 import LFM2, LFM2MOE
from engine.models.llama import LLAMA
from engine.models.mamba import MAMBA
from engine.models.mamba2 import MAMBA2
from engine.models.minimax_m2 import MINIMAX_M2
from engine.models.nemotron_h import NEMOTRON_H, NEMOTRON_H_MOE
from engine.models.olmo2 import OLMO2
from engine.models.olmoe import OLMOE
from engine.models.phi2 import PHI2
from engine.models.phi3 import PHI3
from engine.models.phimoe import PHIMOE
from engine.models.qwen2 import QWEN2, QWEN2MOE
from engine.models.qwen3 import QWEN3, QWEN3MOE
from engine.models.qwen3next import QWEN3NEXT
from engine.models.qwen35 import QWEN35, QWEN35MOE
from engine.models.seed_oss import SEED_OSS
from engine.models.smollm3 import SMOLLM3
from engine.models.stablelm import STABLELM
from engine.models.starcoder2 import STARCODER2

_ALL = (
    APERTUS,
    BERT,
    COHERE2,
    COMMAND_R,
    DEEPSEEK2,
    ERNIE4_5,
    EXAONE4,
    FALCON,
    FALCON_H1,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GLM4,
    GLM4MOE,
    GPT2,
    GPTNEOX,
    GPT_OSS,
    GRANITE,
    GRANITEHYBRID,
    HUNYUAN_DENSE,
    LFM2,
    LFM2MOE,
    LLAMA,
    MAMBA,
    MAMBA2,
    MINIMAX_M2,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    OLMO2,
    OLMOE,
    PHI2,
    PHI3,
    PHIMOE,
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
    STARCODER2,
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
