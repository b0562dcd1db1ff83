"""The benchmark: that contenders compute the same, and that the numbers are put together rightly.

Nothing here fails by time.
"""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from jaxblock import cli
from jaxblock.bench import jax_side, measure, report, worker
from jaxblock.bench.contenders import LIMIT, OURS
from jaxblock.bench.measure import Measured, PeerError, Result
from jaxblock.bench.rows import SMOLLM2, Row, choose, component_rows, cpu_rows, model_rows, work

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"
SPEC = importlib.util.spec_from_file_location("gpu", SCRIPT)
gpu = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu)

TINY = {**SMOLLM2, **gpu.TINY}
SIZES = {
    "rms_norm": dict(T=6, D=32),
    "swiglu": dict(T=6, D=32, F=48),
    "embed": dict(T=41, D=32, V=97),
    "loss": dict(T=6, D=32, V=97),
}
COMPONENTS = [row for kind, size in SIZES.items() for row in component_rows(kind, size)]
MODELS = model_rows(
    "tiny",
    TINY,
    ("forward", dict(B=2, T=5)),
    ("generate", dict(B=2, T=5, new=3)),
    ("train", dict(B=2, T=5)),
)
# Every kind, forward and backward, and both dtypes, in as few compilations as that takes.
TRIED = [row for row in COMPONENTS if row.backward != (row.kind == "rms_norm")]
TRIED = [row for row in TRIED if (row.dtype == "bfloat16") == (row.kind in ("swiglu", "rms_norm"))]
TRIED += [row for row in MODELS if row.dtype == "float32"]


# What is measured ---------------------------------------------------------------------------------


def test_the_rows():
    """Those of the issue, each in both dtypes; the quick ones are the same rows, smaller."""
    rows = cpu_rows()
    names = [f"{row.name} {row.dtype}" for row in rows]
    assert len(set(names)) == len(names) == 2 * len({row.name for row in rows})
    for name in (
        "rms_norm 4096x4096 forward+backward bfloat16",
        "swiglu 2048x576x1536 forward float32",
        "swiglu 8x1024x2816 forward bfloat16",
        "embed 2048x576x49152 forward+backward float32",
        "loss 1024x576x49152 forward+backward bfloat16",
        "SmolLM2-135M forward 4x256 bfloat16",
        "SmolLM2-135M generate 8x256+64 float32",
        "SmolLM2-135M train 4x256 bfloat16",
        "first SmolLM2-135M forward 1x256 float32",
    ):
        assert name in names
    quick = cpu_rows(quick=True)
    assert [(row.kind, row.dtype) for row in quick] == [(row.kind, row.dtype) for row in rows]
    assert {row.kind for row in choose(rows, "^SWIGLU 8x.*bfl")} == {"swiglu"}
    assert len(choose(rows, "^SWIGLU 8x.*bfl")) == 1
    assert choose(rows, None) == rows


def test_the_least_work():
    by_name = {f"{row.name} {row.dtype}": row for row in cpu_rows()}
    # x and y; backward x, dy and dx on top. 16 MiB each.
    assert work(by_name["rms_norm 4096x1024 forward float32"]).bytes == 2 * 2**24
    assert work(by_name["rms_norm 4096x1024 forward+backward float32"]).bytes == 5 * 2**24
    swiglu = work(by_name["swiglu 1024x1024x2816 forward+backward bfloat16"])
    assert swiglu.flops == 3 * 2 * 3 * 1024 * 1024 * 2816
    assert swiglu.product == (1024, 1024, 2 * 2816)
    # Two operations for each parameter and token, and the scores besides; the table counts once.
    tokens, parameters = 4 * 256, 134_515_008
    forward = work(by_name["SmolLM2-135M forward 4x256 float32"])
    assert 1.0 < forward.flops / (2 * tokens * parameters) < 1.1
    train = work(by_name["SmolLM2-135M train 4x256 float32"])
    assert train.flops == 3 * forward.flops and train.bytes == 7 * 4 * parameters
    # The first of 64 new tokens comes out of the prompt.
    assert work(by_name["SmolLM2-135M generate 1x256+64 bfloat16"]).bytes == 63 * 2 * parameters


# All contenders compute the same ------------------------------------------------------------------


def run_all(side, row):
    """What each contender of one side gives."""
    found = {}
    side.setup(row)
    for name, build in side.builders(row).items():
        if "compile" in name:
            continue  # Half a minute, and the same function.
        contender = build()
        contender.reset()
        result = contender.call()
        contender.wait(result)
        outputs = contender.outputs(result)
        assert bool(outputs) != name.startswith(LIMIT), name
        if outputs:
            found[name] = {key: worker.digest(array) for key, array in outputs.items()}
    return found


@pytest.mark.torch
@pytest.mark.parametrize("row", TRIED, ids=lambda row: f"{row.name}, {row.dtype}")
def test_contenders_compute_the_same(row):
    from jaxblock.bench import torch_side

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = run_all(jax_side, row) | run_all(torch_side, row)
    ours = found.pop(OURS)
    assert len(found) >= (2 if row.kind in SIZES else 1)
    expected = {"forward": {"logits"}, "generate": {"tokens"}, "train": {"losses"}}
    if row.kind in SIZES:
        inputs = {"rms_norm": {"x", "scale"}, "swiglu": {"x", "gate", "up", "down"}}
        inputs |= {"embed": {"table"}, "loss": {"x", "table"}}
        expected[row.kind] = {"y"} | (inputs[row.kind] if row.backward else set())
    assert ours.keys() == expected[row.kind]
    for name, outputs in found.items():
        assert worker.disagreement(ours, outputs) <= measure.AGREE[row.dtype], name


def test_what_differs_is_seen():
    random = np.random.default_rng(0)
    y = random.standard_normal((7, 33))
    one = {"y": worker.digest(y)}
    assert worker.disagreement(one, one) == 0.0
    assert worker.disagreement(one, {"y": worker.digest(1.01 * y)}) == pytest.approx(0.01, rel=0.1)
    swapped = np.roll(y, 1, axis=1)
    for other in (swapped, -y, np.zeros_like(y)):
        assert worker.disagreement(one, {"y": worker.digest(other)}) > 0.5
    for other in (y * np.nan, y[:6], y.T):
        assert worker.disagreement(one, {"y": worker.digest(other)}) == np.inf
    assert worker.disagreement(one, {"z": one["y"]}) == np.inf
    # Of a large array a sample is kept, over all rows and columns.
    large = worker.digest(np.arange(2**20).reshape(1024, 1024))
    assert worker.SAMPLE / 2 < large.sample.size < 2 * worker.SAMPLE
    assert len(set(large.sample % 1024)) == 1024


# Turns --------------------------------------------------------------------------------------------


class FakeSide:
    """A side without a process: contenders that take given times, and a note of who was called."""

    def __init__(self, seconds, log, broken=(), lost=()):
        self.seconds, self.log, self.broken, self.lost = seconds, log, broken, lost
        self.asked = None

    def send(self, method, *args):
        self.asked = method, args

    def receive(self):
        return self.ask(*self.asked)

    def ask(self, method, *args):
        if method == "build":
            return list(self.seconds), {"version": "1"}
        self.log.append((method, args[0]))
        if args[0] in self.broken or (args[0] in self.lost and ("first", args[0]) != self.log[-1]):
            raise PeerError("it is broken")
        if method == "first":
            y = np.ones(3) * (2 if args[0] == "other" else 1)
            limits = args[0].startswith(LIMIT)
            return worker.First(9.0, {} if limits else {"y": worker.digest(y)}, (100, 40))
        return self.seconds[args[0]]

    def close(self):
        pass


def test_contenders_take_turns():
    row = Row("swiglu", "float32", dict(T=2, D=3, F=4))
    log = []
    sides = {
        "jax": FakeSide({OURS: 0.5, "gone": 1.0, f"{LIMIT}product, jax": 0.1}, log, ["gone"]),
        "torch": FakeSide(
            {"torch": 1.0, "other": 2.0, "late": 1.0, f"{LIMIT}product, torch": 0.05},
            log,
            [],
            ["late"],
        ),
    }
    said = []
    result = measure.measure_row(row, sides, repeats=9, say=said.append)
    assert said == ["swiglu 2x3x4 forward, float32"]
    assert result.skipped == {"gone": "it is broken", "late": "it is broken"}
    assert set(result.peers) == {"torch", "other"}
    assert (result.fastest_peer, result.ratio) == ("torch", 2.0)
    assert result.wrong == ["other"]
    assert result.peers["torch"].difference == 0.0
    # 6 T D F operations at the rate of the faster product, of 2 T D 2F.
    assert result.ours.peak == (100, 40)
    assert result.limit_s == pytest.approx(0.05 * 1.5)
    assert all(len(one.seconds) == 9 for one in result.measured.values())
    # Nobody is called a second time before all others were, and everyone comes first some time.
    turns = [name for method, name in log if method == "time"][-9 * 5 :]
    rounds = [turns[start : start + 5] for start in range(0, len(turns), 5)]
    assert all(set(names) == set(result.measured) for names in rounds)
    assert {names[0] for names in rounds} == set(result.measured)


def test_a_short_call_is_repeated(monkeypatch):
    """As many calls as fill a repetition, after one that warms the caches."""
    asked = []

    class Side(FakeSide):
        def ask(self, method, *args):
            if method == "time":
                asked.append(args[1:])
            return super().ask(method, *args)

    row = Row("embed", "float32", dict(T=2, D=3, V=4))
    measure.measure_row(row, {"jax": Side({OURS: 0.002}, [])}, repeats=1, say=print)
    assert asked[-1] == (10, 1)
    measure.measure_row(row, {"jax": Side({OURS: 3.0}, [])}, repeats=1, say=print)
    assert asked[-1] == (1, 0)


def results():
    rows = cpu_rows()
    good = Result(
        rows[0],
        {
            OURS: Measured(1.0, [0.010, 0.012, 0.011], (300, 100)),
            "torch": Measured(2.0, [0.022, 0.021, 0.023], (400, 200), 1e-7),
            "flax.nnx": Measured(2.0, [0.030] * 3, None, 1e-7),
            f"{LIMIT}copy, jax": Measured(0.0, [0.009] * 3),
        },
        {"tokamax": "not installed"},
        {"jax": "1"},
    )
    wrong = Result(
        next(row for row in rows if row.kind == "generate" and row.dtype == "float32"),
        {
            OURS: Measured(1.0, [2.0]),
            "transformers": Measured(2.0, [1.0], None, float("inf")),
        },
        {},
        {},
    )
    failed = Result(rows[1], {}, {"everything in jax": "its process ended (-9)"}, {})
    return [good, wrong, failed]


def test_the_report(tmp_path):
    rows = json.loads(report.to_json(results()))
    good, wrong, failed = rows
    assert good["row"] == "rms_norm 4096x1024 forward" and good["dtype"] == "float32"
    assert good["ours_s"] == 0.011 and good["peers"] == {"torch": 0.022, "flax.nnx": 0.030}
    assert good["ratio"] == pytest.approx(2.0) and good["fastest_peer"] == "torch"
    assert good["limit_s"] == pytest.approx(0.009) and good["limits"] == {"copy, jax": 0.009}
    assert good["measured"][OURS]["quartiles_s"] == pytest.approx([0.0105, 0.0115])
    assert good["measured"][OURS]["peak_bytes"] == 300
    assert wrong["wrong"] == ["transformers"] and wrong["ratio"] == 0.5
    assert wrong["measured"]["transformers"]["difference"] == "other outputs"
    assert wrong["measured"][OURS]["tokens_per_s"] == 32.0
    assert failed["ours_s"] is failed["ratio"] is failed["limit_s"] is None

    lines = [report.line(result) for result in results()]
    assert "torch 22 ms (x2.00)" in lines[0] and "without tokamax: not installed" in lines[0]
    assert "WRONG: not what transformers computes" in lines[1]
    assert lines[2] == "  failed: its process ended (-9)"
    # Greedy text may part at near ties of 16-bit logits, and nothing else may.
    parted = results()[1]
    sixteen = Row("generate", "bfloat16", parted.row.sizes, config=parted.row.config)
    assert not Result(sixteen, parted.measured, {}, {}).wrong


def test_the_chart(tmp_path):
    pytest.importorskip("matplotlib")
    report.chart(results(), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


# The command --------------------------------------------------------------------------------------


def bench(*arguments):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)], catch_exceptions=False)


def test_the_command(monkeypatch, tmp_path):
    given = {}

    def measured(rows, **options):
        given.update(rows=rows, **options)
        return iter(results()[: given.get("keep", 1)])

    monkeypatch.setattr(measure, "measure", measured)
    out = bench("--rows", "rms_norm 4096x1024 forward,? ", "--json", tmp_path / "rows.json")
    assert out.exit_code == 0
    assert {row.name for row in given["rows"]} == {"rms_norm 4096x1024 forward"}
    assert (given["repeats"], given["fresh"]) == (9, True)
    assert "1 of 1 rows at 1.0 or above; median 2.00" in out.stdout
    assert "rms_norm 4096x1024 forward" in out.stdout and "without tokamax" in out.stderr
    assert json.loads((tmp_path / "rows.json").read_text())[0]["ratio"] == pytest.approx(2.0)
    given["keep"] = 3
    assert bench("--quick").exit_code == 1
    assert (given["repeats"], given["fresh"]) == (measure.QUICK_REPEATS, False)


def test_bad_options_of_the_command(monkeypatch, tmp_path):
    for arguments, message in (
        (["--rows", "("], "--rows must be a regular expression"),
        (["--rows", "nothing"], "--rows must match one of these; got nothing\n  rms_norm"),
        (["--json", tmp_path / "no" / "rows.json"], "--json must name a file in a folder"),
        (["--chart", tmp_path], "--chart must name a file in a folder"),
    ):
        out = bench(*arguments)
        assert out.exit_code == 2 and message in out.stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    out = bench("--chart", tmp_path / "chart.png")
    assert out.exit_code == 2 and 'pip install "jaxblock[bench]"' in out.stderr


# In two processes, and on a GPU -------------------------------------------------------------------


@pytest.mark.torch
def test_the_script_for_a_gpu(monkeypatch, tmp_path, capsys):
    """A row of it, small, through two processes; and its check of parity, in this one."""
    cases = gpu.parity_cases(small=True)
    assert len(cases) == 10
    _, *rest = cases["embed"]
    cases = {"embed": cases["embed"], "faulty": (lambda tokens, table: table, *rest)}
    monkeypatch.setattr(gpu, "parity_cases", lambda small: cases)
    monkeypatch.setattr(gpu, "apart", lambda function, *args: function(*args))
    rows = [row for row in gpu.component_list(small=True) if row.kind == "loss"][:1]
    monkeypatch.setattr(gpu, "component_list", lambda small: rows)
    monkeypatch.setattr(gpu, "model_list", lambda small: [])
    status = gpu.run(True, 8.0, tmp_path / "gpu.json", dtypes=("float32",))
    out = capsys.readouterr()
    assert status == 1 and "parity: FAILED in faulty" in out.out
    assert "embed: ok in float32" in out.err and "faulty: FAILED" in out.err
    (row,) = json.loads((tmp_path / "gpu.json").read_text())
    assert row["row"] == "loss 6x32x97 forward+backward" and row["wrong"] == []
    assert {"torch", "optax dense"} <= row["peers"].keys()
    assert "torch.compile" not in row["peers"]
    assert row["ours_s"] > 0 and row["limit_s"] > 0
    assert {"jax", "torch", "flax", "cores"} <= row["setting"].keys()
