"""The engine's README: its example runs, and every file and test that it names is there."""

import contextlib
import io
import re
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[2] / "engine"
TESTS = Path(__file__).resolve().parent
FOLDERS = (TESTS, TESTS / "sampling", TESTS / "generation", TESTS.parent / "gguftools")
TEXT = (ENGINE / "README.md").read_text(encoding="utf-8")


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().splitlines()[-1] == "[4. 0.]"


def test_every_row_names_tests_that_are_there():
    rows = 0
    for line in TEXT.splitlines():
        names = re.findall(r"`(?:\.\./tests/gguftools/)?(test_\w+)(?:\.py(?:::(\w+))?)?`", line)
        file = None
        for first, second in names:
            path = next((p for folder in FOLDERS if (p := folder / f"{first}.py").is_file()), None)
            file = path or file
            assert file is not None, line
            for name in ([second] if second else []) if path else [first]:
                assert f"def {name}(" in file.read_text(encoding="utf-8"), (file.name, name)
        rows += bool(names)
    assert rows > 35


def test_every_file_named_is_there():
    folders = "ops|kernels|backends|models|cache|generation"
    named = set(re.findall(rf"`((?:{folders})/\w*(?:\.py)?|\w+\.py)", TEXT)) - {"page.html"}
    missing = [name for name in named if not any((folder / name).exists() for folder in (ENGINE, *FOLDERS))]
    assert not missing
