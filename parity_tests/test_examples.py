"""The examples run as a reader would run them; what they report is right, and they can fail."""

import json
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
REFERENCE = EXAMPLES / "transformer_block_reference.py"

pytestmark = [pytest.mark.optimized, pytest.mark.torch]


@pytest.fixture(scope="module")
def report():
    """What the reference experiment prints, run as a script."""
    run = subprocess.run([sys.executable, REFERENCE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def figure(report, name):
    (value,) = re.findall(rf"^{name}=(.+)$", report, re.MULTILINE)
    return json.loads(value)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("rms_norm_max_abs_diff", 4.768e-07),
        ("unweighted_rms_after_max_error", 9.120e-06),
        ("tied_projection_max_abs_diff", 0.0),
    ],
)
def test_figures_are_at_or_below_the_published_ones(report, name, published):
    assert 0.0 <= figure(report, name) <= published


def test_range_explains_the_deviation(report):
    # After the norm a row of RMS r has the RMS r / sqrt(r^2 + eps): the smallest row is furthest
    # from one. In float32, with u = 2^-24: a mean of eight squares is off by at most 8 u, which a
    # root halves, so two means give 8 u; rsqrt gives 8 u, the product u, the last root u.
    smallest, largest = figure(report, "unweighted_rms_before_range")
    assert smallest < largest
    expected = 1 - smallest / (smallest**2 + 1e-6) ** 0.5
    assert abs(figure(report, "unweighted_rms_after_max_error") - expected) <= 18 * 2.0**-24


def test_report_is_complete(report):
    assert report.endswith("\nPASS\n")
    assert "FAIL" not in report
    for package in ("python", "jaxblock", "jax", "optax", "torch"):
        assert re.search(rf"\b{package} \d+\.\d+", report)
    assert re.search(r"^device: jax .+, torch cpu$", report, re.MULTILINE)
    assert "token id 4 are exactly equal" in report
    for dtype in ("float32", "bfloat16"):
        for name in ("embedding", "scale", "gate", "up", "down"):
            assert f"ok   {dtype}: gradient of parameter {name} " in report
    for name in ("embedding", "scale", "gate", "up", "down"):
        assert f"ok   AdamW update/lr of {name} " in report


def wrong_eps(module):
    original = module.rms_norm
    return "rms_norm", lambda x, scale, *, eps: original(x, scale, eps=10 * eps)


def swapped_gate_and_up(module):
    original = module.pack_gate_up
    return "pack_gate_up", lambda gate, up: original(up, gate)


def lost_tie(module):
    original = module.unembed
    return "unembed", lambda x, embedding: original(x, jax.lax.stop_gradient(embedding))


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        (wrong_eps, "FAIL published 9.120e-06"),
        (swapped_gate_and_up, "FAIL float32: output, jit"),
        (lost_tie, "FAIL AdamW update/lr of embedding"),
    ],
)
def test_planted_fault_fails(fault, caught, monkeypatch, capsys):
    # A module of its own for each fault: its jitted functions remember what they were traced with.
    spec = spec_from_file_location(REFERENCE.stem, REFERENCE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, *fault(module))
    # Strict promotion, on in these tests, is more than optax's bias correction bears.
    with jax.numpy_dtype_promotion("standard"):
        assert module.main() == 1
    printed = capsys.readouterr().out
    assert caught in printed
    assert printed.endswith("\nFAIL\n")
