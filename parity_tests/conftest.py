"""Strict settings for every test in this folder, and the fixtures that they share."""

import gc
import os
import re
import shutil
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import hypothesis

# Compiling is most of what the suite does, and many tests compile what another one did: they share
# it, across the processes of one run. Read by JAX when it is imported.
COMPILED = "JAX_COMPILATION_CACHE_DIR"
OWNS_COMPILED = COMPILED not in os.environ
if OWNS_COMPILED:
    os.environ[COMPILED] = tempfile.mkdtemp(prefix="jaxblock-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Half of that is LLVM's optimisation, which changes neither the programs nor their products and
# sums. Without it unless JAX_DISABLE_MOST_OPTIMIZATIONS=0 says otherwise; files marked `optimized`,
# which state what a user's own programs reach, are compiled as a user's are in any case.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import jaxtyping
import pytest

# The suite runs a process a core: threads of PyTorch in each would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No silent promotion of dtypes or ranks; warnings are errors too (pyproject.toml).
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# GPUs default to TF32 and TPUs to bfloat16 passes, which no float32 bound would meet.
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_num_cpu_devices", 4)

# Every annotated shape can be checked at run time, but only where a test asks for it (the fixture
# `shape_checks`): beartype looks first, and a test of our own error messages would never see them.
jaxtyping.install_import_hook(["jaxblock.ops", "torch_ref"], "beartype.beartype")
jaxtyping.config.update("jaxtyping_disable", True)

hypothesis.settings.register_profile(
    "jaxblock", deadline=None, max_examples=20, derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("jaxblock")

HAS_TORCH = find_spec("torch") is not None
IMPORTS_TORCH = re.compile(r"^(import|from) (torch|torch_ref|transformers)\b", re.MULTILINE)

# These files cannot even be imported without PyTorch; the header says that they are missing.
collect_ignore = [
    path.name
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if not HAS_TORCH and IMPORTS_TORCH.search(path.read_text())
]


def pytest_report_header(config):
    packages = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")
    installed = [name for name in packages if find_spec(name)]
    devices = jax.devices()
    lines = [
        "versions: " + ", ".join(f"{name} {version(name)}" for name in installed),
        f"devices: {len(devices)} x {devices[0].device_kind} ({jax.default_backend()})",
        f"float32 products: precision {jax.config.jax_default_matmul_precision!r}",
    ]
    if not HAS_TORCH:
        lines.append(f"no PyTorch: skipping tests marked torch, not collecting {collect_ignore}")
    return lines


def pytest_sessionstart():
    # What was imported stays: a collection that looks at it again and again is 4 % of the time.
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_unconfigure():
    if OWNS_COMPILED:
        shutil.rmtree(os.environ[COMPILED], ignore_errors=True)


def pytest_collection_modifyitems(items):
    for item in items:
        if not HAS_TORCH and item.get_closest_marker("torch"):
            item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))


@pytest.fixture(scope="module")
def shape_checks():
    """The jaxtyping annotations of `jaxblock.ops` and `torch_ref`, checked at every call."""
    jaxtyping.config.update("jaxtyping_disable", False)
    yield
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture(scope="module")
def one_thread():
    """As the suite runs a process a core: PyTorch's threads would wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def optimization(request):
    """Compile as users do, in this process and in those it starts, where a file is `optimized`."""
    setting = "jax_disable_most_optimizations"
    default = jax.config.read(setting)
    if not default or request.node.get_closest_marker("optimized") is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(setting.upper(), "0")
        jax.config.update(setting, False)
        jax.clear_caches()
        yield
        jax.config.update(setting, default)
        jax.clear_caches()


@pytest.fixture
def branches(monkeypatch):
    """Small arrays go through the branches of ops/cpu.py that only large ones have."""
    from jaxblock.ops import cpu

    jax.clear_caches()
    monkeypatch.setattr(cpu, "LARGE", 1)
    yield
    jax.clear_caches()


@pytest.fixture
def x64():
    """64-bit types, for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def torch_ref():
    """The specification, for test files that need PyTorch in some tests only."""
    import torch_ref

    return torch_ref
