"""`jaxblock generate`: a prompt goes on, token by token."""

import io
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxblock.commands.shared import Dtype, findings_as_text, say, stop

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from jaxblock.config import DecoderConfig


def generate(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="A Hugging Face or Orbax folder with its tokenizer.json."
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What to go on from. Without it: standard input, less the newline at its end.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="The most tokens to add.")
    ] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            min=0.0,
            help="Draw from softmax(logits / T); 0 means the likeliest token, and so does giving "
            "none of this, --top-k and --top-p.",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Draw from the K likeliest tokens alone."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Draw from the fewest tokens alone that together have the probability P.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**31 - 1, help="Of what is drawn.")
    ] = 0,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16 or float16: what weights and activations are rounded to. "
            "Without it: what the files hold.",
        ),
    ] = None,
) -> None:
    """Continue a prompt with a model from a folder.

    The new text goes to standard output as it comes, everything else to standard error: the number
    of tokens of the prompt, the time to the first new one, and tokens a second. The end-of-text
    tokens of config.json and generation_config.json end it.

    Exit status: 0, or 2 if folder, prompt or options cannot be used.
    """
    draws = _check_sampling(temperature, top_k, top_p)
    if not folder.is_dir():
        stop(f"generate: FOLDER must be a folder that can be read; got {folder}")
    from jaxblock.config import DecoderConfig

    with findings_as_text():
        config = DecoderConfig.from_hf(folder)
    if top_k is not None and top_k > config.vocab_size:
        stop(f"generate: --top-k must not exceed V={config.vocab_size}; got top_k={top_k}")
    tokenizer = _load_tokenizer(folder)
    stop_tokens = _stop_tokens(folder, config)
    ids = tokenizer.encode(_read_prompt(prompt)).ids
    _check_prompt(ids, config, max_new_tokens)

    import jax
    import jax.numpy as jnp

    from jaxblock.commands import stream
    from jaxblock.commands.loading import load

    began = time.perf_counter()
    with findings_as_text():
        # Whether the table is tied is known for sure only now.
        config, params = load(folder, dtype=dtype and str(dtype))
    say(f"Loaded in {time.perf_counter() - began:.1f} s")

    began = time.perf_counter()
    tokens = jnp.asarray([ids], jnp.int32)
    key = jax.random.key(seed) if draws else None
    programs = stream.compile_stream(
        params,
        tokens,
        config,
        max_new_tokens=max_new_tokens,
        sampler=_sampler(draws, temperature, top_k, top_p),
        key=key,
    )
    say(f"Compiled in {time.perf_counter() - began:.1f} s")

    if isinstance(sys.stdout, io.TextIOWrapper):
        # An old terminal cannot show every character.
        sys.stdout.reconfigure(errors="replace")
    text = stream.TextStream(tokenizer, ids)
    times = [time.perf_counter()]
    ended = "the most that were asked for"
    for token in stream.stream_tokens(
        programs,
        params,
        tokens,
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
        key=key,
    ):
        times.append(time.perf_counter())
        if token < 0:
            _write("\n")
            stop(
                f"generate: logits must be numbers; got NaN after {len(times) - 2} new tokens. "
                "Does the checkpoint hold NaN, or does float16 overflow? Try --dtype float32"
            )
        if token in stop_tokens:
            ended = f"ended by {tokenizer.id_to_token(token) or token}"
            break
        _write(text.push(token))
    _write(text.end() + "\n")
    say(_statistics(len(ids), times, ended))


def _check_sampling(temperature: float | None, top_k: int | None, top_p: float | None) -> bool:
    """Whether tokens are drawn."""
    if top_k is not None and top_p is not None:
        stop(f"generate: give --top-k or --top-p; got top_k={top_k}, top_p={top_p}")
    if top_p is not None and not 0 < top_p <= 1:
        stop(f"generate: --top-p must be above 0 and at most 1; got top_p={top_p}")
    if temperature is None:
        return top_k is not None or top_p is not None
    if not temperature < float("inf"):
        stop(f"generate: --temperature must be finite; got temperature={temperature}")
    return temperature > 0


def _sampler(draws: bool, temperature: float | None, top_k: int | None, top_p: float | None) -> Any:
    from jaxblock import ops

    temperature = 1.0 if temperature is None else temperature
    if not draws:
        return ops.greedy
    if top_k is not None:
        return partial(ops.top_k, k=top_k, temperature=temperature)
    if top_p is not None:
        return partial(ops.top_p, p=top_p, temperature=temperature)
    return partial(ops.sample, temperature=temperature)


def _load_tokenizer(folder: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        stop(f"generate: FOLDER must hold a tokenizer.json; got none in {folder}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower one
        stop(f"generate: the tokenizers library must be able to read {file}; got {error}")
    # Some files keep the settings of training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _stop_tokens(folder: Path, config: "DecoderConfig") -> list[int]:
    """The end-of-text tokens of both files: chat models name theirs in the second alone."""
    found = set(config.special_tokens.eos_token_ids)
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            entries = json.loads(file.read_bytes())
            ends = entries.get("eos_token_id")
        except (ValueError, OSError, AttributeError) as error:
            stop(f"generate: generation_config.json must be a JSON object; got {file} ({error})")
        ends = ends if isinstance(ends, list) else [ends]
        found |= {token for token in ends if isinstance(token, int)}
    return sorted(token for token in found if 0 <= token < config.vocab_size)


def _read_prompt(prompt: str | None) -> str:
    """The option, or standard input. Either may hold bytes that are no text."""
    if prompt is None and sys.stdin.isatty():
        say("The prompt, ended by Ctrl-D:")
    try:
        data = sys.stdin.buffer.read() if prompt is None else os.fsencode(prompt)
        text = data.decode("utf-8")
    except UnicodeError as error:
        stop(f"generate: the prompt must be text in UTF-8; got {error}")
    return text.removesuffix("\n") if prompt is None else text


def _check_prompt(ids: list[int], config: "DecoderConfig", max_new_tokens: int) -> None:
    if not ids:
        stop("generate: the prompt must have at least one token; got an empty one")
    if max(ids) >= config.vocab_size:
        stop(
            f"generate: every token must have a row of the embedding; got the token {max(ids)} in "
            f"the prompt, V={config.vocab_size}. Is tokenizer.json of another model?"
        )
    length, made_for = len(ids) + max_new_tokens, config.max_position_embeddings
    if made_for is not None and length > made_for:
        say(f"Note: {length} tokens may be read, and the model was made for {made_for}")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _statistics(prompt: int, times: list[float], ended: str) -> str:
    """`times`: of the start, and of every new token, a stop token among them."""
    start, *new = times
    words = f"Prompt: {prompt} tokens. First new token after {new[0] - start:.3f} s. "
    words += f"{len(new)} new tokens ({ended})"
    if len(new) > 1:
        words += f", {(len(new) - 1) / (new[-1] - new[0]):.1f} tokens/s"
    return words
