"""jaxblock on one GPU: first whether it is right, then how fast, beside PyTorch on the same GPU.

    python benchmarks/gpu.py

needs jax and torch with CUDA, flax, optax and transformers (pip install '.[cuda,parity]'), no
network, and at most eight minutes; what does not fit is named and left out. It writes a list of
rows, as `jaxblock bench --json` does, to benchmarks/results/gpu.json, and prints the table. --small
runs the same on tiny sizes, on whatever device there is, without torch.compile: a test of itself.
"""

import argparse
import multiprocessing
import os
import sys
import time
from functools import partial
from pathlib import Path

# Two frameworks share one GPU: each gets less than half of it, once and for all.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.45")

import numpy as np
from rich.console import Console

import jaxblock
from jaxblock.bench import measure, report
from jaxblock.bench.rows import component_rows, model_rows

RESULTS = Path(__file__).parent / "results" / "gpu.json"
LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# One block of Llama-3.1-8B, with a vocabulary that costs next to nothing.
BLOCK = LLAMA | {
    "vocab_size": 256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
}
# Llama-3.2-1B.
BILLION = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
}
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


# Right? -------------------------------------------------------------------------------------------


def parity_cases(small):
    """Name -> the function in both packages, inputs, and what `assert_parity` must know of it."""
    import torch_ref

    random = np.random.default_rng(0)
    T, D, F, V, E = (5, 16, 24, 33, 4) if small else (130, 256, 688, 1009, 8)

    def normal(*shape, scale=1.0):
        return random.standard_normal(shape) * scale

    x, scale, table = normal(2, T, D), 1 + normal(D, scale=0.1), normal(V, D, scale=D**-0.5)
    gate_up, down = normal(D, 2, F, scale=D**-0.5), normal(F, D, scale=F**-0.5)
    experts = normal(E, D, 2, F, scale=D**-0.5), normal(E, F, D, scale=F**-0.5)
    q, k, v = normal(2, T, 8, 16), normal(2, T, 2, 16), normal(2, T, 2, 16)
    angles = random.uniform(0, 6, (2, T, 8))
    tokens, labels = random.integers(0, V, (2, T)), random.integers(0, V, (2, T))

    def both(name, inputs, *, roundings=2, reduction_length=None, **options):
        functions = (partial(getattr(side, name), **options) for side in (jaxblock, torch_ref))
        return *functions, inputs, dict(roundings=roundings, reduction_length=reduction_length)

    return {
        "rms_norm": both("rms_norm", [x, scale], eps=1e-5, cast="before_scale"),
        "swiglu": both("swiglu", [x, gate_up, down]),
        "geglu": both("geglu", [x, gate_up, down]),
        "embed": both("embed", [tokens, table], roundings=0),
        "unembed": both("unembed", [x, table], roundings=0),
        "apply_rotary": both(
            "apply_rotary",
            [q, np.float32(np.cos(angles)), np.float32(np.sin(angles))],
            roundings=0,
            # Two products; the gradients of cos and sin add 8 heads, too.
            reduction_length=18,
        ),
        "attention": both("attention", [q, k, v], roundings=1, scale=0.25),
        "moe_swiglu": both(
            "moe_swiglu",
            [x, normal(D, E), *experts],
            roundings=3,
            num_active=2,
            renormalize=True,
        ),
        "cross_entropy": both("cross_entropy", [normal(2, T, V), labels], roundings=0),
        "linear_cross_entropy": both(
            "linear_cross_entropy", [x, table, labels], roundings=0, chunk_size=T
        ),
    }


def say(line):
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def check(dtypes, small):
    """The core of the parity suite on this device: forward, jitted, and every gradient.

    float32 products run at "highest"; PyTorch and the float64 that judges both run on the CPU.
    """
    from jaxblock.parity import assert_parity

    failed = []
    for name, (ours, theirs, inputs, options) in parity_cases(small).items():
        try:
            assert_parity(ours, theirs, inputs, dtypes=dtypes, **options)
            say(f"  {name}: ok in {', '.join(dtypes)}")
        except Exception as error:  # The other functions are worth knowing about, too.
            failed.append(name)
            say(f"  {name}: FAILED\n{error}")
    return failed


# Fast? --------------------------------------------------------------------------------------------


def component_list(small):
    """The most wanted first: what eight minutes do not hold falls off the end."""
    sizes = {
        "rms_norm": dict(T=6, D=32) if small else dict(T=16384, D=4096),
        "swiglu": dict(T=6, D=32, F=48) if small else dict(T=8192, D=4096, F=14336),
        "loss": dict(T=6, D=32, V=97) if small else dict(T=8192, D=4096, V=128256),
    }
    rows = [row for kind, size in sizes.items() for row in component_rows(kind, size)]
    rows = [row for row in rows if row.kind != "loss" or row.backward]
    return sorted(rows, key=lambda row: row.dtype == "float32")


def model_list(small):
    """In bfloat16; one block in float32 first, which shows that the whole of it is right."""
    block, billion = (BLOCK | TINY, BILLION | TINY) if small else (BLOCK, BILLION)
    T, prompt, new = (6, 4, 3) if small else (4096, 256, 64)
    blocks = model_rows(
        "Llama-3.1-8B block", block, ("forward", dict(B=1, T=T)), ("train", dict(B=1, T=T))
    )
    models = model_rows(
        "Llama-3.2-1B",
        billion,
        ("generate", dict(B=1, T=prompt, new=new)),
        ("generate", dict(B=8, T=prompt, new=new)),
        ("train", dict(B=2, T=T // 2)),
    )
    wanted = [row for row in blocks if row.kind == "forward" or row.dtype == "bfloat16"]
    return wanted + [row for row in models if row.dtype == "bfloat16"]


def apart(function, *args):
    """Call it in a process of its own, which gives the GPU's memory back when it ends."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def run(small, minutes, json_file, dtypes=("float32", "bfloat16")):
    """Check, measure, print, write. Returns the exit status."""
    start = time.monotonic()
    say("Is it right?")
    failed = apart(check, dtypes, small)

    say("Is it fast?")
    components, models = component_list(small), model_list(small)
    repeats = 2 if small else measure.REPEATS
    options = dict(repeats=repeats, say=say, leave_out=["compile"] if small else [])
    results: list[measure.Result] = []

    def late():
        return time.monotonic() - start > 60 * minutes - 45  # A model row takes as long.

    for rows, fresh in ((components, False), (models, not small)):
        for result in measure.measure(rows, fresh=fresh, stop=late, **options):
            say(report.line(result))
            results.append(result)
    left = [row for row in components + models if row not in [one.row for one in results]]
    report.print_table(results, Console())
    print(
        "parity:", f"FAILED in {', '.join(failed)}" if failed else f"ok in {' and '.join(dtypes)}"
    )
    if left:
        print("no time for:", "; ".join(f"{row.name} {row.dtype}" for row in left))
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(report.to_json(results))
    return int(bool(failed or any(one.ours is None or one.wrong for one in results)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any device")
    parser.add_argument("--minutes", type=float, default=8.0, help="at most so many (8)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows go")
    given = parser.parse_args()
    sys.exit(run(given.small, given.minutes, given.json))


if __name__ == "__main__":
    main()
