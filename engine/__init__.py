"""The inference engine: lazy graph, planned memory, backends, model families, evaluation."""

from engine.errors import EngineError

__all__ = ["EngineError"]
