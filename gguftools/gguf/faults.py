"""What can be wrong with a file, as data: the reader raises the first fault, `gguftools check` lists them all."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """error: programs refuse the file or compute nonsense; warning: some do; note: worth knowing."""

    ERROR = 3
    WARNING = 2
    NOTE = 1

    def __str__(self) -> str:
        return self.name.lower()


DAMAGED = "the file is damaged"
AGAIN = "download it again"


@dataclass(frozen=True)
class Fault:
    """One finding.

    code: short name of its kind, stable for scripts; message: what is wrong; remedy: what to do; offset: byte of the
    file, None where no single byte is at fault; where: the key or tensor, "" for the file as a whole.
    """

    code: str
    message: str
    remedy: str = DAMAGED
    offset: int | None = None
    where: str = ""
    severity: Severity = Severity.ERROR

    def line(self, file: str) -> str:
        """As the reader's error message."""
        at = "" if self.offset is None else f" (byte {self.offset:,})"
        return f"{file}: {self.message}{at}; {self.remedy}"
