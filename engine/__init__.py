"""The inference engine: lazy graph, planned memory, backends, model families, evaluation.

It takes plain mappings of metadata and tensors and never opens a file; `gguftools.load` joins the two.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError

if TYPE_CHECKING:
    from engine.adapters import ControlVector, Lora
    from engine.batch import Batch
    from engine.contexts import Code, ContextParams, ModelContext
    from engine.evaluate import Divergence, Evaluation, collect, evaluate
    from engine.session import Session

_LAZY = {
    "Session": "engine.session",
    "ModelContext": "engine.contexts",
    "ContextParams": "engine.contexts",
    "Code": "engine.contexts",
    "Batch": "engine.batch",
    "Lora": "engine.adapters",
    "ControlVector": "engine.adapters",
    "evaluate": "engine.evaluate.scoring",
    "collect": "engine.evaluate.importance",
    "Evaluation": "engine.evaluate.scoring",
    "Divergence": "engine.evaluate.scoring",
}

__all__ = [
    "Batch",
    "Code",
    "ContextParams",
    "ControlVector",
    "Divergence",
    "EngineError",
    "Evaluation",
    "Lora",
    "ModelContext",
    "Session",
    "collect",
    "evaluate",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:  # numba and the BLAS are loaded when something is computed, not before
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'engine' has no attribute '{name}'")
