"""The rules of the house: mirrored signatures, live parameters, imports, docstrings, README."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from helpers import equations

import jaxblock
from jaxblock import ops
from jaxblock.bench import report
from jaxblock.bench.rows import cpu_rows

ROOT = Path(__file__).parent.parent
FUNCTIONS = [getattr(ops, name) for name in ops.__all__]
STEMS = (
    "normalization",
    "feed_forward",
    "embedding",
    "rotary",
    "attention",
    "moe",
    "cross_entropy",
    "sampling",
)
each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def parse(path):
    return ast.parse((ROOT / path).read_text())


def sources(folder):
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))


def run(*arguments, cwd=ROOT, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# Both sides say the same --------------------------------------------------------------------------


def public_signatures(path):
    """Name -> the text of its parameters and result, as written, with the array types made one."""
    functions = {}
    for node in parse(path).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            text = f"{ast.unparse(node.args)} -> {ast.unparse(node.returns)}"
            for theirs, ours in (("Tensor", "Array"), ("torch.Generator", "PRNGKeyArray")):
                text = text.replace(theirs, ours)
            functions[node.name] = text
    return functions


@pytest.mark.parametrize("stem", STEMS)
def test_ops_and_torch_ref_have_the_same_signatures(stem):
    """Names, order, kinds, defaults and shape strings, read from the text of both."""
    assert public_signatures(f"jaxblock/ops/{stem}.py") == public_signatures(f"torch_ref/{stem}.py")


@pytest.mark.parametrize("stem", STEMS)
def test_both_sides_have_the_same_formulas(stem):
    formulas, specified = (
        {
            node.name: ast.get_docstring(node).splitlines()[0]
            for node in parse(f"{package}/{stem}.py").body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        }
        for package in ("jaxblock/ops", "torch_ref")
    )
    assert formulas == specified


def test_every_public_function_is_in_one_of_the_stems():
    written = {name for stem in STEMS for name in public_signatures(f"jaxblock/ops/{stem}.py")}
    assert written == set(ops.__all__)


@pytest.mark.torch
def test_both_packages_export_the_same_names(torch_ref):
    assert ops.__all__ == torch_ref.__all__ == sorted(ops.__all__)
    for name in ops.__all__:
        ours, theirs = (inspect.signature(getattr(m, name)) for m in (ops, torch_ref))
        assert list(ours.parameters) == list(theirs.parameters)
        for parameter, other in zip(
            ours.parameters.values(), theirs.parameters.values(), strict=True
        ):
            assert (parameter.kind, parameter.default) == (other.kind, other.default)


# Every parameter does something -------------------------------------------------------------------


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, SCALE = random(0, 2, 4), random(1, 4)
GATE_UP, DOWN, TABLE = random(2, 4, 2, 6), random(3, 6, 4), random(4, 8, 4)
GATE, FUSED, TOKENS = random(5, 4, 6), random(6, 4, 12), jnp.array([0, 7])
KEYS = [jax.random.key(0), jax.random.key(1)]
LAYER = dict(x=X, gate_up=GATE_UP, down=DOWN)
OTHER_LAYER = dict(
    x=2 * X,
    gate_up=2 * GATE_UP,
    down=2 * DOWN,
    gate_up_bias=random(7, 2, 6),
    down_bias=random(8, 4),
)
NORMAL = dict(embedding=TABLE, vocab_size=9, fill="normal", key=KEYS[0])

QUERIES, ROW_KEYS = random(10, 2, 3, 4, 6), random(11, 2, 5, 2, 6)
ANGLES = random(12, 2, 3, 3)
SEEN = jnp.asarray(np.random.default_rng(13).random((2, 1, 3, 5)) > 0.3)
LABELS = jnp.array([[1, 5, -100], [0, 2, 7]])
LOGITS = random(14, 2, 3, 8)
ROWS = random(15, 2, 3, 4)
COUNTED = dict(
    labels=LABELS.at[0, 0].set(3),
    # Another id that is ignored makes -100 a bad one, so this pair of values goes together.
    ignore_index=7,
    num_valid=6,
    label_smoothing=0.1,
    z_loss=0.1,
    weights=jnp.abs(random(16, 2, 3)),
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
EXPERTS = dict(
    x=ROWS, router=random(17, 4, 5), gate_up=random(18, 5, 4, 2, 6), down=random(19, 5, 6, 4)
)
DRAW = dict(logits=random(20, 50, 8), key=KEYS[0])
OTHER_DRAW = dict(logits=-random(20, 50, 8), key=KEYS[1], temperature=3.0, num_valid=3)

# function -> (arguments of a call, another value of each parameter).
LIVE = {
    "rms_norm": (
        # bfloat16, since in float32 both casts are the same function.
        dict(x=random(0, 8, 33).astype(jnp.bfloat16), scale=random(1, 33), eps=1e-6),
        dict(
            x=random(9, 8, 33).astype(jnp.bfloat16),
            scale=random(9, 33),
            eps=1.0,
            scale_offset=1.0,
            cast="before_scale",
        ),
    ),
    "intermediate_size": (
        dict(hidden_size=4096, multiple_of=256),
        dict(hidden_size=5120, multiple_of=4096, ffn_dim_multiplier=1.3),
    ),
    "pack_gate_up": (dict(gate=GATE, up=GATE), dict(gate=2 * GATE, up=2 * GATE)),
    "unpack_gate_up": (
        dict(fused=FUSED, layout="blocks", block_size=2),
        dict(fused=2 * FUSED, layout="gate_up", block_size=3),
    ),
    "swiglu": (LAYER, OTHER_LAYER),
    "geglu": (LAYER, OTHER_LAYER | dict(approximate=False)),
    "embed": (
        dict(tokens=TOKENS, embedding=TABLE),
        dict(tokens=TOKENS // 7, embedding=2 * TABLE),
    ),
    "unembed": (
        dict(x=X, embedding=TABLE),
        dict(x=2 * X, embedding=2 * TABLE, softcap=1.0, num_valid=7),
    ),
    "resize_embedding": (
        NORMAL,
        dict(embedding=2 * TABLE, vocab_size=10, fill="mean", allow_shrink=True, key=KEYS[1]),
    ),
    "rotary_frequencies": (
        dict(head_dim=6, theta=100.0),
        dict(head_dim=8, theta=50.0, scaling=YARN, rotary_dim=4),
    ),
    "rotary_magnitude": (dict(scaling=None), dict(scaling=YARN)),
    "rotary_cos_sin": (
        dict(positions=TOKENS, frequencies=random(21, 3)),
        dict(positions=TOKENS + 1, frequencies=random(22, 3), magnitude=2.0),
    ),
    "apply_rotary": (
        dict(x=QUERIES, cos=ANGLES, sin=ANGLES),
        dict(x=2 * QUERIES, cos=2 * ANGLES, sin=2 * ANGLES, pairing="interleaved"),
    ),
    "attention": (
        dict(q=QUERIES, k=ROW_KEYS, v=ROW_KEYS, scale=1.0),
        dict(
            q=2 * QUERIES,
            k=2 * ROW_KEYS,
            v=2 * ROW_KEYS,
            scale=0.5,
            causal=False,
            window=2,
            softcap=1.0,
            mask=SEEN,
        ),
    ),
    "route_top_k": (
        dict(router_logits=random(23, 3, 5), num_active=2, renormalize=False),
        dict(router_logits=-random(23, 3, 5), num_active=3, renormalize=True),
    ),
    "moe_swiglu": (
        dict(**EXPERTS, num_active=2, renormalize=False),
        dict(**{name: -value for name, value in EXPERTS.items()}, num_active=3, renormalize=True),
    ),
    "cross_entropy": (dict(logits=LOGITS, labels=LABELS), dict(logits=2 * LOGITS, **COUNTED)),
    "linear_cross_entropy": (
        dict(x=ROWS, embedding=TABLE, labels=LABELS, chunk_size=2),
        dict(x=2 * ROWS, embedding=2 * TABLE, chunk_size=4, softcap=1.0, **COUNTED),
    ),
    "next_token_labels": (
        dict(tokens=LABELS),
        dict(tokens=LABELS + 1, mask=LABELS == 5, ignore_index=-1),
    ),
    "greedy": (dict(logits=random(20, 50, 8)), dict(logits=-random(20, 50, 8), num_valid=3)),
    "sample": (DRAW, OTHER_DRAW),
    "top_k": (dict(**DRAW, k=3), dict(**OTHER_DRAW, k=2)),
    "top_p": (dict(**DRAW, p=0.9), dict(**OTHER_DRAW, p=0.2)),
}
# Where a call with the other value alone would be refused for another reason.
ALONG = {
    ("unpack_gate_up", "layout"): dict(block_size=None),
    ("resize_embedding", "fill"): dict(key=None),
    # -100 is a bad label where another one is ignored.
    ("cross_entropy", "ignore_index"): dict(labels=LABELS.at[0, 2].set(7)),
    ("linear_cross_entropy", "ignore_index"): dict(labels=LABELS.at[0, 2].set(7)),
    ("cross_entropy", "num_valid"): dict(labels=jnp.array([[1, 5, -100], [0, 2, -100]])),
    ("linear_cross_entropy", "num_valid"): dict(labels=jnp.array([[1, 5, -100], [0, 2, -100]])),
}
# How a result is computed, and not what it is.
WITHOUT_TRACE = {("resize_embedding", "allow_shrink"), ("linear_cross_entropy", "chunk_size")}


def results(function, arguments):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(function(**arguments))]


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        (name, parameter)
        for name, (_, others) in LIVE.items()
        for parameter in others
        if (name, parameter) not in WITHOUT_TRACE
    ],
)
def test_every_parameter_is_live(name, parameter):
    """Another value of it, another result."""
    function, (arguments, others) = getattr(jaxblock, name), LIVE[name]
    changed = {parameter: others[parameter], **ALONG.get((name, parameter), {})}
    base, other = results(function, arguments), results(function, {**arguments, **changed})
    assert not all(map(np.array_equal, base, other))


def test_allow_shrink_is_live():
    """This one decides between a result and an error."""
    with pytest.raises(ValueError, match="allow_shrink"):
        jaxblock.resize_embedding(TABLE, 7)
    assert jaxblock.resize_embedding(TABLE, 7, allow_shrink=True).shape == (7, 4)


def test_chunk_size_is_live():
    """This one decides how much is held at once."""
    rows, labels = random(24, 60, 4), jnp.zeros(60, jnp.int32)

    def largest(chunk_size):
        loss = partial(jaxblock.linear_cross_entropy, chunk_size=chunk_size)
        jaxpr = jax.make_jaxpr(jax.grad(lambda x: loss(x, TABLE, labels)[0]))(rows)
        return max(output.aval.size for equation in equations(jaxpr) for output in equation.outvars)

    assert largest(60) == 60 * TABLE.shape[0] > largest(20)


def test_the_table_of_parameters_is_complete():
    signatures = {f.__name__: set(inspect.signature(f).parameters) for f in FUNCTIONS}
    assert {name: set(others) for name, (_, others) in LIVE.items()} == signatures


# Shapes are checked in tests ----------------------------------------------------------------------


def annotated_wrongly(x: jaxtyping.Float[jax.Array, "D F"]) -> jaxtyping.Float[jax.Array, "D F"]:
    return x.T


def test_the_annotations_are_checked_where_a_test_asks_for_it(shape_checks):
    import beartype

    with pytest.raises(jaxtyping.TypeCheckError, match="scale"):
        jaxblock.rms_norm(X, SCALE[:3], eps=1e-6)
    with pytest.raises(jaxtyping.TypeCheckError, match="tokens"):
        jaxblock.embed(TOKENS.astype(jnp.float32), TABLE)
    # The result too, not the arguments alone.
    checked = jaxtyping.jaxtyped(annotated_wrongly, typechecker=beartype.beartype)
    checked(random(0, 3, 3))
    with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
        checked(X)


@each_function
def test_every_public_function_is_instrumented(function):
    assert inspect.unwrap(function) is not function
    annotations = inspect.signature(function).parameters.values()
    assert all(parameter.annotation is not parameter.empty for parameter in annotations)


@pytest.mark.torch
def test_torch_ref_is_instrumented(torch_ref, shape_checks):
    import torch

    with pytest.raises(jaxtyping.TypeCheckError, match="scale"):
        torch_ref.rms_norm(torch.ones(2, 4), torch.ones(3), eps=1e-6)


# Imports ------------------------------------------------------------------------------------------

HEAVY = ["torch", "transformers", "matplotlib", "gguf", "typer"]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("jaxblock", [*HEAVY, "flax", "optax", "rich"]),
        ("jaxblock.parity", [*HEAVY, "flax", "optax", "rich"]),
        ("jaxblock.nnx", HEAVY),
        ("jaxblock.linen", HEAVY),
    ],
)
def test_an_import_stays_light(module, absent):
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    result = run("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def imported(path):
    """Full names of all modules that a file imports, inside functions too."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            # `from jaxblock import ops` imports a module, `from jaxblock.ops import embed` a name.
            for alias in node.names:
                if (ROOT / node.module.replace(".", "/") / f"{alias.name}.py").exists():
                    yield f"{node.module}.{alias.name}"
                if (ROOT / node.module.replace(".", "/") / alias.name).is_dir():
                    yield f"{node.module}.{alias.name}"


def part(module):
    """jaxblock.ops.checks -> ops; torch_ref.embedding -> torch_ref; jax.numpy -> jax."""
    first, *rest = module.split(".")
    return rest[0] if first == "jaxblock" and rest else first


# From the ground up: a part imports parts of floors below its own, and the libraries beside it.
# torch stands in no part of the decoder but `checkpoint`, which reads pickled files through it
# where it is asked to.
FLOORS = [
    {"ops": {"jax", "jaxtyping", "numpy"}},
    {"config": set(), "sequence": {"jax", "jaxtyping"}},
    {
        "parameters": {"jax", "jaxtyping"},
        "block": {"jax", "jaxtyping"},
        "cache": {"jax", "jaxtyping"},
        "costs": set(),
    },
    {"decoder": {"jax", "jaxtyping", "numpy"}, "vocabulary": {"jax", "jaxtyping"}},
    {
        "generate": {"jax", "jaxtyping"},
        "train": {"jax", "jaxtyping", "optax"},
        "nnx": {"jax", "jaxtyping", "flax"},
        "linen": {"jax", "jaxtyping", "flax"},
        "checkpoint": {"jax", "numpy", "ml_dtypes", "gguf", "torch"},
    },
    {"orbax_folder": {"jax", "orbax"}},
]
# The harness knows nothing of ours; what compares whole models knows both.
HARNESS = {"jax", "numpy", "torch"}
PEERS = {"bench": {"flax", "matplotlib", "optax", "tokamax"}, "model_parity": {"gguf"}}
TOOLS = HARNESS | {"jaxtyping", "rich", "tokenizers", "torch_ref", "transformers", "typer"}


def imported_parts(path):
    return {part(module) for module in imported(path)} - set(sys.stdlib_module_names) - {"jaxblock"}


def test_imports_go_down_only():
    """The command line is on top."""
    below, parts = set(), {}
    for floor in FLOORS:
        parts |= {name: libraries | below for name, libraries in floor.items()}
        below |= floor.keys()
    parts["parity"] = HARNESS
    seen = set()
    for path in sources("jaxblock"):
        name = path.parts[1].removesuffix(".py")
        seen.add(name)
        if name in parts:
            assert imported_parts(path) <= parts[name] | {name}, path
        elif name not in ("cli", "__init__"):
            ours = {other.parts[1].removesuffix(".py") for other in sources("jaxblock")} - {"cli"}
            assert imported_parts(path) <= TOOLS | ours | PEERS.get(name, set()), path
    assert parts.keys() <= seen
    for path in sources("torch_ref"):
        assert imported_parts(path) <= {"torch", "jaxtyping", "torch_ref"}, path
    assert imported_parts("jaxblock/__init__.py") <= below


def test_ops_are_on_floors():
    """Layouts, checks, what the CPU needs and precision at the bottom; one idea a file above."""
    below = {
        "sharding": [],
        "checks": ["sharding"],
        "cpu": [],
        "precision": ["cpu"],
        "remat": ["cpu"],
    }
    bottom = {f"jaxblock.ops.{stem}" for stem in below}
    for stem in STEMS:
        ours = {m for m in imported(f"jaxblock/ops/{stem}.py") if m.startswith("jaxblock")}
        assert ours <= bottom | {"jaxblock.ops"}, stem
    for stem, names in below.items():
        ours = [m for m in imported(f"jaxblock/ops/{stem}.py") if m.startswith("jaxblock.ops.")]
        assert ours == [f"jaxblock.ops.{name}" for name in names], stem


def test_nothing_private_of_jax_is_used():
    for folder in ("jaxblock", "torch_ref", "parity_tests", "examples"):
        for path in sources(folder):
            private = [name for name in imported(path) if name.startswith("jax._src")]
            assert not private, path


# Modules ------------------------------------------------------------------------------------------


def computes(node):
    """An operator between values. Not `int | None`, a type, nor the -1 of an index."""
    if isinstance(node, ast.BinOp):
        return not isinstance(node.op, ast.BitOr)
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.op, ast.Not) and not isinstance(node.operand, ast.Constant)
    return isinstance(node, ast.AugAssign)


@pytest.mark.parametrize("stem", ["nnx", "linen"])
def test_module_files_do_no_arithmetic(stem):
    tree = parse(f"jaxblock/{stem}.py")
    assert not [ast.unparse(node) for node in ast.walk(tree) if computes(node)]
    # Nor through functions: of jax they use dtypes and initialisers.
    calls = [ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    computing = re.compile(r"^(jnp|jax|lax|np|numpy|math)\.")
    assert not [call for call in calls if computing.match(call)]


def test_only_checks_writes_errors_in_ops():
    for path in sources("jaxblock/ops"):
        raises = [n.lineno for n in ast.walk(parse(path)) if isinstance(n, ast.Raise | ast.Assert)]
        assert path.name == "checks.py" or not raises, (path, raises)


# Documentation ------------------------------------------------------------------------------------


PUBLIC = [getattr(jaxblock, name) for name in jaxblock.__all__]


@pytest.mark.parametrize(
    "function", [f for f in PUBLIC if not isinstance(f, type)], ids=lambda f: f.__name__
)
def test_docstrings(function):
    formula, *rest = inspect.getdoc(function).splitlines()
    assert " = " in formula, formula
    text = "\n".join(rest)
    for section in ("Args", "Returns", "Raises"):
        # "Returns, Raises, Precision: as `swiglu`." is one heading for three.
        assert re.search(rf"^(\w+, )*{section}(, \w+)*:", text, re.MULTILINE), section
    arguments = text.split("Args:")[1].split("\n\n")[0]
    described = re.findall(r"^  (\w+(?:, \w+)*): ", arguments, re.MULTILINE)
    names = [name for entry in described for name in entry.split(", ")]
    assert names == list(inspect.signature(function).parameters)


def test_the_public_list():
    """One name a line, in order, nothing else public; every name in README."""
    assert jaxblock.__all__ == sorted(jaxblock.__all__)
    assert set(ops.__all__) <= set(jaxblock.__all__)
    lines = (ROOT / "jaxblock/__init__.py").read_text().splitlines()
    assert all(f'    "{name}",' in lines for name in jaxblock.__all__)
    # `generate` is a module and the function in it; the function is what the package shows.
    modules = {path.parts[1].removesuffix(".py") for path in sources("jaxblock")} - {"generate"}
    public = {name for name in vars(jaxblock) if not name.startswith("_")} - modules
    assert public == set(jaxblock.__all__)
    assert all(callable(getattr(jaxblock, name)) for name in jaxblock.__all__)
    readme = (ROOT / "README.md").read_text()
    missing = [name for name in jaxblock.__all__ if not re.search(rf"\b{name}\b", readme)]
    assert not missing


def readme_blocks(language):
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_readme_code_runs(tmp_path):
    """The Python blocks, in order, as one program; without PyTorch, those that do not need it."""
    has_torch = find_spec("torch") is not None
    blocks = [block for block in readme_blocks("python") if has_torch or "torch" not in block]
    assert blocks
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks))
    result = run("-W", "error", str(program), cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_speeds_in_readme_are_those_that_were_measured():
    rows = json.loads((ROOT / "benchmarks/results/cpu.json").read_text())
    assert {(row["row"], row["dtype"]) for row in rows} == {
        (row.name, row.dtype) for row in cpu_rows()
    }
    assert report.markdown(rows) in (ROOT / "README.md").read_text()


def test_commands_in_readme_exist():
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)\b(?=`|  |\n)", text))
    assert {"demo", "test"} <= named <= targets
    # Files and folders that it points to.
    paths = re.findall(r"`((?:jaxblock|torch_ref|parity_tests|examples)[\w/]*(?:\.py)?)`", text)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


def test_no_file_names_a_machine():
    """Neither a package registry's host nor a folder of the machine it was written on."""
    hosts = ["pypi" + ".org", "python" + "hosted", "simple" + "/index"]
    folders = ["/" + name + "/" for name in ("work", "root", "tmp", "home")]
    folder_names = ("jaxblock", "torch_ref", "parity_tests", "examples", "benchmarks", ".ci")
    files = [path for name in folder_names for path in (ROOT / name).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    read = 0
    for path in files:
        if path.suffix in (".pyc", ".so") or "__pycache__" in path.parts:
            continue
        text = path.read_text(errors="replace")
        read += 1
        # A word before the slash makes it part of a longer path, as in networks/home/.
        found = [folder for folder in folders if re.search(rf"(?<![\w.]){folder}", text)]
        assert not found + [host for host in hosts if host in text], path
    assert read > 30
