"""Measuring models: perplexity, divergence from a base, importance of weights, multiple choice."""

from engine.evaluate.importance import Collection, collect
from engine.evaluate.scoring import Divergence, Evaluation, Scores, StoredBase, evaluate
from engine.evaluate.statistics import Estimate

__all__ = ["Collection", "Divergence", "Estimate", "Evaluation", "Scores", "StoredBase", "collect", "evaluate"]
