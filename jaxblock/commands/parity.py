"""`jaxblock parity`: jaxblock beside PyTorch on a trained model."""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from jaxblock import model_report, smollm2
from jaxblock.commands.shared import Dtype, check_json_option, say, stop

if TYPE_CHECKING:
    from jaxblock.model_parity import Row

# What `parity` needs beyond the core; transformers reads no GGUF file without accelerate.
PARITY_EXTRA = ("torch", "transformers", "gguf", "accelerate")

PROMPT = (
    "The library of Alexandria was founded in the third century BC. Ships that entered the harbour "
    "had to hand over their books, which were copied by scribes; the copies went back to the "
    "owners and the originals stayed on the shelves. Today historians"
)


def parity(
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A GGUF file of the llama family with tied embeddings. Without it: "
            "SmolLM2-135M-Instruct, fetched once (93 MB) and kept in the cache.",
        ),
    ] = None,
    prompt: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="What the model reads, 1 to 512 tokens. Without it: three English sentences.",
            show_default=False,
        ),
    ] = PROMPT,
    dtype: Annotated[
        list[Dtype] | None,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16 or float16: what weights and activations are rounded to. May "
            "be given more than once. Without it: float32 and bfloat16.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write every number to a JSON file, too."),
    ] = None,
) -> None:
    """Compare jaxblock with PyTorch on a trained model.

    PyTorch runs the model on a prompt. What its embedding, every RMSNorm, every SwiGLU layer and
    the tied projection were given and returned is recorded, and the jitted jaxblock functions get
    the same inputs and weights. Both results are measured against float64. JAX passes if it errs no
    more than rounding explains, or no more than twice as much as PyTorch does.

    Exit status: 0 for PASS, 1 for FAIL, 2 if the comparison could not be made.
    """
    missing = [name for name in PARITY_EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        stop(
            "parity: PyTorch, transformers, gguf and accelerate must be installed; got "
            f'missing={", ".join(missing)}. Install them: pip install "jaxblock[parity]"'
        )
    check_json_option("parity", json_file)

    try:
        gguf = checkpoint or smollm2.fetch(say)
    except smollm2.FetchError as error:
        stop(str(error))

    # Read when the libraries are imported: a local file is no matter for the hub, and ours is the
    # only progress display.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    progress = Console(stderr=True, highlight=False)
    say("Loading PyTorch, transformers and the model")
    with progress.status("a quarter of a minute"):
        from jaxblock import model_parity

        try:
            model, tokenizer = model_parity.load(gguf)
            tokens = model_parity.tokenize(tokenizer, prompt)
        except model_parity.ModelError as error:
            stop(str(error))

    rows: list[Row] = []
    for name in dict.fromkeys(dtype or (Dtype.float32, Dtype.bfloat16)):
        say(f"Running the model in {name} and comparing")
        rows += track(
            model_parity.compare_model(model, tokens, name),
            name,
            total=len(model_parity.sites(model.config)),
            console=progress,
            transient=True,
            disable=not progress.is_terminal,
        )

    setting = model_parity.setting(model, gguf, prompt, tokens)
    model_report.print_report(setting, rows, Console())
    if json_file is not None:
        try:
            model_report.write_json(setting, rows, json_file)
        except OSError as error:
            stop(f"parity: --json must be writable; got {error}")
    raise typer.Exit(0 if all(row.judgement.ok for row in rows) else 1)
