"""What was done, or would be: for reports and for JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quant.mixes import Choice

COLUMNS = ("tensor", "shape", "from", "to", "bytes before", "bytes after", "rule")


@dataclass(frozen=True)
class Quantized:
    """One output: a choice per tensor in file order.

    outputs: its files; file_bytes: of them together, exact; without_importance: tensors of blocks that are quantized
    without although there is a matrix; warnings: lines for people; reused: tensors taken from an older output;
    resumed: bytes that an earlier run had done; errors: tensor -> relative error that quantizing it again adds;
    zeroed: tensor -> values that were not finite and are 0 now.
    """

    output: Path
    preset: str
    choices: list[Choice]
    outputs: tuple[Path, ...] = ()
    file_bytes: int = 0
    without_importance: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    resumed: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    zeroed: dict[str, int] = field(default_factory=dict)

    @property
    def bytes_before(self) -> int:
        """Bytes of the tensors' data in the source."""
        return sum(c.bytes_before for c in self.choices)

    @property
    def bytes_after(self) -> int:
        return sum(c.n_bytes for c in self.choices)

    @property
    def n_weights(self) -> int:
        return sum(c.n_weights for c in self.choices)

    @property
    def bpw(self) -> float:
        """Bits per weight over all tensors."""
        return 8 * self.bytes_after / max(1, self.n_weights)

    @property
    def substituted(self) -> list[Choice]:
        """Tensors whose rows forced another type."""
        return [c for c in self.choices if c.fallback]

    @property
    def fallbacks(self) -> int:
        return len(self.substituted)

    @property
    def bpw_wanted(self) -> float:
        """Bits per weight if every row were whole blocks of the type that was wanted."""
        bits = sum(c.n_weights * c.wanted.bpw if c.fallback else 8 * c.n_bytes for c in self.choices)
        return bits / max(1, self.n_weights)

    @property
    def fallback_share(self) -> float:
        """Part of all weights that got another type."""
        return sum(c.n_weights for c in self.substituted) / max(1, self.n_weights)

    def rows(self) -> list[tuple]:
        """Per tensor: name, shape, type before and after, bytes before and after, the rule that decided."""
        return [
            (c.name, list(c.shape), c.source.name, c.target.name, c.bytes_before, c.n_bytes, c.rule)
            for c in self.choices
        ]

    def totals(self) -> list[tuple]:
        """Per type of the output: its name, tensors, weights, bytes."""
        found: dict[str, list[int]] = {}
        for c in self.choices:
            row = found.setdefault(c.target.name, [0, 0, 0])
            for i, n in enumerate((1, c.n_weights, c.n_bytes)):
                row[i] += n
        return sorted(((name, *row) for name, row in found.items()), key=lambda row: -row[3])

    def summary(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        names = ("name", "shape", "from", "to", "bytes_before", "bytes", "rule")
        return {
            "output": str(self.output),
            "outputs": [str(path) for path in self.outputs],
            "preset": self.preset,
            "file_bytes": self.file_bytes,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bpw": self.bpw,
            "fallbacks": self.fallbacks,
            "fallback_share": self.fallback_share,
            "bpw_without_fallbacks": self.bpw_wanted,
            "without_importance": list(self.without_importance),
            "warnings": list(self.warnings),
            "reused": list(self.reused),
            "resumed_bytes": self.resumed,
            "added_error": self.errors,
            "zeroed": self.zeroed,
            "tensors": [dict(zip(names, row)) for row in self.rows()],
        }
