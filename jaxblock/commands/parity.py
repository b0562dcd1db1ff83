"""`jaxblock parity`: jaxblock beside PyTorch on a trained model."""

import importlib.util
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

import jaxblock
from jaxblock.commands.shared import Dtype, check_json_option, findings_as_text, say, stop
from jaxblock.model_parity import report, smollm2

if TYPE_CHECKING:
    from jaxblock.model_parity.both_models import BothModels
    from jaxblock.model_parity.components import Row
    from jaxblock.model_parity.whole_model import WholeModel

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
        typer.Argument(
            metavar="[CHECKPOINT]",
            help="A Hugging Face folder with its tokenizer, or a GGUF file of the llama family. "
            "Without it: SmolLM2-135M-Instruct, fetched once (93 MB) and kept in the cache.",
            show_default=False,
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
    """Compare jaxblock with PyTorch on a whole model.

    transformers and jaxblock each read the checkpoint and run it on a prompt: embedding, every
    block, final norm, logits, and 64 tokens of greedy text, in float32 and bfloat16. Both are
    measured against float64. JAX passes if its logits err at most 1.3 times as much as PyTorch's
    (1.1 times in 16 bits), every stage stays within its limit, and both write the same text; in 16
    bits they may part at a near tie.

    Of a Llama with tied embeddings every norm, SwiGLU layer, lookup and projection is compared on
    its own, too, given what PyTorch's was given.

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
        path = checkpoint or smollm2.fetch(say)
    except smollm2.FetchError as error:
        stop(str(error))

    # Read when the libraries are imported: a local file is no matter for the hub, and ours is the
    # only progress display.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    progress = Console(stderr=True, highlight=False)
    say("Loading PyTorch, transformers and the model")
    with progress.status("a quarter of a minute"):
        from jaxblock.model_parity import both_models, components, whole_model

        try:
            with findings_as_text():
                both = both_models.load(path)
            tokens = both_models.tokenize(both, prompt)
        except both_models.ModelError as error:
            stop(str(error))

    by_component = components.has_components(both.config)
    if not by_component:
        say("Comparing whole models alone: components are those of a Llama with tied embeddings")
    wholes: list[WholeModel] = []
    rows: list[Row] = []
    for name in dict.fromkeys(dtype or (Dtype.float32, Dtype.bfloat16)):
        say(f"Running both models in {name}")
        with progress.status("float64 takes longest"):
            wholes.append(whole_model.compare_whole(both, tokens, name))
        if by_component:
            rows += track(
                components.compare_components(both, tokens, name),
                f"components in {name}",
                total=len(components.sites(both.config)),
                console=progress,
                transient=True,
                disable=not progress.is_terminal,
            )

    setting = _setting(both, prompt, tokens[0].tolist())
    report.print_report(setting, wholes, rows, Console())
    if json_file is not None:
        try:
            report.write_json(setting, wholes, rows, json_file)
        except OSError as error:
            stop(f"parity: --json must be writable; got {error}")
    ok = all(whole.ok for whole in wholes) and all(row.judgement.ok for row in rows)
    raise typer.Exit(0 if ok else 1)


def _setting(both: "BothModels", prompt: str, tokens: list[int]) -> dict[str, Any]:
    """What the numbers depend on: versions, devices, precision, weights and prompt."""
    import jax

    from jaxblock.model_parity.both_models import MATMUL_PRECISION

    config = both.config
    packages = ("jax", "jaxlib", "torch", "transformers", "gguf", "numpy")
    sizes = {
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.feed_forward.intermediate_size,
        "vocab_size": config.vocab_size,
        "parameters": config.num_parameters(),
    }
    return {
        "versions": {
            "python": platform.python_version(),
            "jaxblock": jaxblock.__version__,
            **{package: version(package) for package in packages},
        },
        "device": {"jax": str(jax.devices()[0]), "torch": str(both.model.device)},
        "precision": MATMUL_PRECISION,
        "model": both.path.name,
        "format": both.report.format,
        "sha256": {file.name: smollm2.sha256(file) for file in both.report.files},
        "sizes": sizes,
        "prompt": prompt,
        "tokens": tokens,
    }
