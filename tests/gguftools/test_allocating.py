"""quantize --target-size: the best choice of types for a size, never over it; constraints; tables that are kept."""

import itertools
import json

import numpy as np
import pytest
from typer.testing import CliRunner

import gguftools
from gguftools.allocating import Table, load_table, solve, target_bytes
from gguftools.cli import app
from gguftools.errors import GGUFError
from gguftools.gguf.reader import GGUF

TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q6_K")


def made(seed=0, n=5):
    """A table of `n` tensors of random costs that fall as types grow."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 9, n) * 256
    bits = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q6_K": 210}
    cost = {f"t{i}": dict(zip(TYPES, (rng.random() * np.array([1, 0.3, 0.08, 0.01])).tolist())) for i in range(n)}
    size = {f"t{i}": {t: int(weights[i] // 256 * bits[t]) for t in TYPES} for i in range(n)}
    return Table("x", cost, size)


@pytest.mark.parametrize("seed", range(8))
def test_close_to_the_best_of_all_choices(seed):
    table = made(seed)
    names = list(table.cost)
    for budget in (3000, 3600, 4400):
        every = [dict(zip(names, c)) for c in itertools.product(TYPES, repeat=len(names))]
        fits = [c for c in every if sum(table.size[n][t] for n, t in c.items()) <= budget]
        if not fits:
            with pytest.raises(GGUFError, match="the smallest choice of types takes"):
                solve(table, budget)
            continue
        best = min(sum(table.cost[n][t] for n, t in c.items()) for c in fits)
        found = solve(table, budget)
        assert found.n_bytes == sum(table.size[n][t] for n, t in found.types.items()) <= budget
        worst = max(sum(table.cost[n][t] for n, t in c.items()) for c in fits)
        assert found.predicted - best <= 0.1 * (worst - best)


def test_constraints():
    table = made()
    found = solve(table, 3600, least=[("^t1$", "Q4_K")], most=[("^t2$", "Q3_K")], fixed=[("^t3$", "Q6_K")])
    assert found.types["t1"] in ("Q4_K", "Q6_K")
    assert found.types["t2"] in ("Q2_K", "Q3_K")
    assert found.types["t3"] == "Q6_K"
    with pytest.raises(GGUFError, match="no type is left for tensor 't1'"):
        solve(table, 10**6, least=[("t1", "Q6_K")], most=[("t1", "Q2_K")])
    with pytest.raises(GGUFError, match="no regular expression"):
        solve(table, 10**6, least=[("(", "Q6_K")])


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "gguftools.allocation/1"}', '{"schema": "other"}'])
def test_files_that_are_no_table(text, tmp_path):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(GGUFError, match="is no table of measurements"):
        load_table(tmp_path / "t.json")


def test_command(tiny, tmp_path):
    """Measured once, used for two sizes; the file tells how it was made, and the recipe makes it again."""
    base, table = str(tiny["bf16"]), str(tmp_path / "table.json")
    text = ["--target-text", str(gguftools.demo_text("calibration"))]
    sizes = {}
    for target, more in (("2200000", text), ("1900000", [])):
        out = tmp_path / f"{target}.gguf"
        done = CliRunner().invoke(
            app, ["quantize", base, str(out), "--target-size", target, "--target-table", table, *more]
        )
        assert done.exit_code == 0, done.output
        sizes[target] = out.stat().st_size
        assert 0.995 * int(target) <= sizes[target] <= int(target)
    kept = load_table(tmp_path / "table.json")
    assert len(kept.cost) == 43
    recipe = gguftools.recipe_of_file(tmp_path / "1900000.gguf")
    gguftools.quantize(tiny["bf16"], tmp_path / "again.gguf", recipe)
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "1900000.gguf").read_bytes()
    out = tmp_path / "fixed.gguf"
    arguments = ["quantize", base, str(out), "--target-bpw", "4.5", "--target-table", table, "--json"]
    done = CliRunner().invoke(app, [*arguments, "--min-type", "token_embd=Q6_K", "--max-type", "ffn=Q4_K"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["bpw"] <= 4.51
    with GGUF(out) as f:
        assert f.tensors["token_embd.weight"].format.bpw >= 6.5
        assert all(t.format.bpw <= 4.5 for n, t in f.tensors.items() if "ffn_" in n and "norm" not in n)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-size", "2M"], "give --target-text TEXT"),
        (["--target-size", "2M", "--recipe", "x.toml"], "exclude each other"),
        (["--target-size", "9G"], "nothing would be gained"),
        (["--target-size", "many"], "many"),
    ],
)
def test_bad_targets(arguments, message, tiny, tmp_path):
    done = CliRunner().invoke(app, ["quantize", str(tiny["bf16"]), str(tmp_path / "o.gguf"), *arguments])
    assert done.exit_code == 1
    assert message in str(done.exception)
    assert not list(tmp_path.glob("*.gguf"))


def test_target_bytes(tiny):
    assert target_bytes(tiny["bf16"], "1M", None) == 1_000_000
    with GGUF(tiny["bf16"]) as f:
        weights, header = sum(t.size for t in f.tensors.values()), f.size - sum(t.nbytes for t in f.tensors.values())
    assert target_bytes(tiny["bf16"], None, 4.0) == header + weights // 2


def test_too_small(tiny, tmp_path):
    types = {"token_embd.weight": {"Q2_K": 10.0, "BF16": 0.0}}
    with GGUF(tiny["bf16"]) as f:
        size = {"token_embd.weight": {"Q2_K": 2048 * 84, "BF16": f.tensors["token_embd.weight"].nbytes}}
    Table("x", types, size).save(tmp_path / "t.json")
    arguments = ["quantize", str(tiny["bf16"]), str(tmp_path / "o.gguf"), "--target-size", "1M", "--target-table"]
    done = CliRunner().invoke(app, [*arguments, str(tmp_path / "t.json")])
    assert done.exit_code == 1
    assert "the smallest choice of types takes" in str(done.exception)
