"""Fuzz one reader, or `all` one after the other: `python -m tests.fuzz gguf --seconds 30`.

With atheris (`pip install '.[fuzz]'`, which has no wheels for every Python) coverage leads the way; without it files
are mutated at random. The last line says how many inputs were tried and how many are findings; a finding is written to
`--findings` and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HANG = 5.0  # seconds for one input


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--corpus", type=Path, help="folder that interesting inputs are kept in")
    parser.add_argument("--findings", type=Path, default=Path("findings"))
    parser.add_argument("--random", action="store_true", help="mutate at random although atheris is there")
    options = parser.parse_args()
    try:
        import atheris
    except ImportError:
        atheris = None
    guided = atheris is not None and not options.random
    if guided:
        with atheris.instrument_imports(include=["gguftools", "engine", "quant.recipes", "json", "tomllib"]):
            from tests.fuzz.targets import TARGETS
    else:
        from tests.fuzz.targets import TARGETS
    if options.target == "all":
        return max(_alone(name, options) for name in TARGETS)
    if options.target not in TARGETS:
        parser.error(f"there are {', '.join(TARGETS)} and all")
    options.findings.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        folder = Path(scratch)
        session = _Session(options.target, TARGETS[options.target], folder, options.findings)
        corpus = options.corpus or folder / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        session.target.seeds(corpus)
        if guided:
            return _guided(atheris, session, corpus, options.seconds)
        return _random(session, corpus, options.seconds)


def _alone(name: str, options: argparse.Namespace) -> int:
    """One reader in a process of its own; libFuzzer does not return."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", name, f"--seconds={options.seconds}"]
    command += [f"--findings={options.findings}"] + ["--random"] * options.random
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode


class _Session:
    """One reader under test, and what was found of it."""

    def __init__(self, name, target, folder: Path, findings: Path) -> None:
        self.name, self.target, self.findings = name, target, findings
        self.file = folder / "input"
        self.inputs = self.accepted = self.crashes = self.hangs = 0
        self.slowest = 0.0
        self.seen: set[str] = set()
        self.start = time.monotonic()

    def run(self, data: bytes) -> None:
        from tests.fuzz.targets import run

        self.inputs += 1
        begin = time.monotonic()
        try:
            self.accepted += run(self.target, data, self.file)
        except Exception as error:
            self.crashes += 1
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self._keep(f"{type(error).__name__}-{Path(frame.filename).stem}-{frame.lineno}", data)
        taken = time.monotonic() - begin
        self.slowest = max(self.slowest, taken)
        if taken > HANG:
            self.hangs += 1
            self._keep(f"hang-{taken:.0f}", data)

    def _keep(self, kind: str, data: bytes) -> None:
        if kind not in self.seen:
            self.seen.add(kind)
            (self.findings / f"{self.name}-{kind}").write_bytes(data)
            sys.stdout.write(f"finding: {self.name}: {kind}\n")

    def report(self) -> int:
        taken = time.monotonic() - self.start
        sys.stdout.write(
            f"{self.name}: {self.inputs:,} inputs in {taken:.0f} s, {self.accepted:,} accepted, "
            f"{self.crashes:,} crashes, {self.hangs:,} hangs, slowest {self.slowest:.2f} s\n"
        )
        sys.stdout.flush()
        return int(self.crashes + self.hangs > 0)


def _guided(atheris, session: _Session, corpus: Path, seconds: int) -> int:
    """libFuzzer never returns, so the report is written when the time is over."""
    import atexit
    import os

    end = session.start + seconds

    def one(data: bytes) -> None:
        session.run(data)
        if time.monotonic() > end:
            code = session.report()
            os._exit(code)

    atexit.register(session.report)
    atheris.Setup(
        [sys.argv[0], str(corpus), "-max_len=16384", "-timeout=60", "-rss_limit_mb=4096", "-verbosity=0"], one
    )
    atheris.Fuzz()
    return 1


#: numbers that sizes are replaced by
_NUMBERS = (0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 255, 256, 2**16 - 1, 2**30, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


def _random(session: _Session, corpus: Path, seconds: int) -> int:
    pool = [path.read_bytes() for path in corpus.iterdir()]
    dice = random.Random(0)
    end = session.start + seconds
    while time.monotonic() < end:
        data = bytearray(dice.choice(pool))
        for _ in range(dice.randint(1, 4)):
            _mutate(data, dice)
        before = session.accepted
        session.run(bytes(data))
        if session.accepted > before and len(pool) < 2000:
            pool.append(bytes(data))
    return session.report()


def _mutate(data: bytearray, dice: random.Random) -> None:
    """One change in place: a byte, a number, a piece cut out, doubled or moved."""
    if not data:
        return
    at = dice.randrange(len(data))
    kind = dice.randrange(5)
    if kind == 0:
        data[at] = dice.randrange(256)
    elif kind == 1:
        size = dice.choice((4, 8))
        data[at : at + size] = (dice.choice(_NUMBERS) % 256**size).to_bytes(size, dice.choice(("little", "big")))
    elif kind == 2:
        del data[at : at + dice.randint(1, 32)]
    elif kind == 3:
        data[at:at] = data[at : at + dice.randint(1, 32)]
    else:
        data[at] ^= 1 << dice.randrange(8)


if __name__ == "__main__":
    sys.exit(main())
