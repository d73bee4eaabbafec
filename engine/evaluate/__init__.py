"""Measuring models: perplexity, divergence from a base, importance of weights."""

from engine.evaluate.importance import collect
from engine.evaluate.scoring import Divergence, Evaluation, Scores, evaluate
from engine.evaluate.statistics import Estimate

__all__ = ["Divergence", "Estimate", "Evaluation", "Scores", "collect", "evaluate"]
