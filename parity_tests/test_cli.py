"""The commands inspect, convert and generate, and what they are made of."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from jaxblock import cli, costs, ops, orbax_folder
from jaxblock.cache import init_cache
from jaxblock.checkpoint import CheckpointError, save_checkpoint
from jaxblock.checkpoint.layout import META, placements
from jaxblock.checkpoint.stored import Origin
from jaxblock.commands import stream
from jaxblock.commands.describe import describe
from jaxblock.config import DecoderConfig
from jaxblock.decoder import decode_step, prefill
from jaxblock.generate import generate
from jaxblock.parameters import flatten, unflatten

CONFIGS = Path(__file__).parent / "data" / "configs"
FILE = {
    "model_type": "llama",
    "vocab_size": 261,
    "hidden_size": 12,
    "intermediate_size": 7,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 30,
}
SLIDING = {
    "model_type": "gemma3_text",
    "sliding_window": 3,
    "sliding_window_pattern": 2,
    "num_hidden_layers": 3,
    "hidden_activation": "gelu_pytorch_tanh",
}
EXPERTS = {"model_type": "qwen3_moe", "head_dim": 4, "moe_intermediate_size": 5}
EXPERTS |= {"num_experts": 6, "num_experts_per_tok": 2}


def config_of(**changes):
    return DecoderConfig.from_hf({**FILE, **changes})


def random_params(config, dtype="float32"):
    random = np.random.default_rng(0).standard_normal
    leaves = {path: random(shape) for path, shape in flatten(config.parameter_shapes())}
    return unflatten({path: jnp.asarray(leaf, dtype) for path, leaf in leaves.items()})


def byte_level(added=()):
    """Every byte is a token, so a character may take four; `added` have the ids from 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({character: id for id, character in enumerate(alphabet)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in added])
    return tokenizer


def sentence_pieces():
    """As Llama 2: a word carries the space before it, and unknown characters are spelt in bytes."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "a", "b", "\u2581a", "ab"]
    merges = [("\u2581", "a"), ("a", "b")]
    vocabulary = {piece: id for id, piece in enumerate(["<unk>", *pieces])}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


def run(*arguments, **keywords):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], **keywords)
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def fail(*arguments):
    raise OSError(28, "no space")


def refused(*arguments, **keywords):
    result = run(*arguments, **keywords)
    assert result.exit_code == 2 and result.stdout == "", result.output
    return result.stderr


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tied bfloat16 Llama with a tokenizer whose last three tokens have no row."""
    folder = tmp_path_factory.mktemp("cli") / "model"
    config = config_of(tie_word_embeddings=True, eos_token_id=256, pad_token_id=261)
    save_checkpoint(folder, config, random_params(config, "bfloat16"))
    added = [f"<{name}>" for name in ("end", "1", "2", "3", "4", "over", "board", "gone")]
    byte_level(added).save(str(folder / "tokenizer.json"))
    return folder


# Costs --------------------------------------------------------------------------------------------


def products(jaxpr, times=1):
    """2 x the multiplications of each matrix product of a jaxpr; whether it has batch axes."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = times * equation.params["length"] if name == "scan" else times
        params = equation.params
        if name == "cond":  # Of one that chooses by platform, the form that is the same on all.
            params = {"branch": params["branches"][-1]}
        for value in jax.tree.leaves(params, is_leaf=lambda v: hasattr(v, "eqns")):
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns"):
                yield from products(value, inner)
        if name == "dot_general":
            (summed, _), (batched, _) = equation.params["dimension_numbers"]
            left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            yield 2 * times * math.prod(result) * math.prod(left[a] for a in summed), bool(batched)
        if name == "ragged_dot_general":  # Each row meets the kernel of one expert.
            rows, sizes = equation.outvars[0].aval.shape, equation.invars[0].aval.shape
            yield 2 * times * math.prod(rows) * sizes[-1], False


@pytest.mark.parametrize("changes", [{}, SLIDING, EXPERTS], ids=["llama", "sliding", "experts"])
def test_costs_are_the_products_that_are_run(changes):
    """Counted in the functions themselves. Attention runs masked pairs, too, so it is apart."""
    config, batch, length = config_of(**changes), 2, 7
    params = jax.tree.map(partial(jnp.zeros, dtype=jnp.float32), config.parameter_shapes(),
                          is_leaf=lambda shape: isinstance(shape, tuple))  # fmt: skip
    cache = init_cache(config, batch, length, dtype=jnp.float32)
    tokens = jnp.zeros((batch, length), jnp.int32)
    setting = dict(batch=batch, length=length, itemsize=4)
    programs = {
        "prefill": (costs.prefill_costs, prefill, tokens),
        "decode": (costs.decode_costs, decode_step, tokens[:, 0]),
    }
    for name, (function, program, read) in programs.items():
        program = jax.make_jaxpr(program, static_argnums=3)(params, read, cache, config)
        run_products = list(products(program.jaxpr))
        parts = {part.part: part for part in function(config, **setting)}
        counted = sum(part.flops for part in parts.values()) - parts["attention"].flops
        assert counted == sum(flops for flops, batched in run_products if not batched), name
        in_attention = sum(flops for flops, batched in run_products if batched)
        # The token that is decoded last sees all of the cache: nothing is masked.
        if name == "decode":
            assert parts["attention"].flops == in_attention
        else:
            assert 0 < parts["attention"].flops < in_attention
    held = cache.keys + cache.values
    assert costs.cache_bytes(config, **setting) == sum(stack.nbytes for stack in held)


@given(st.integers(1, 9), st.integers(0, 9), st.none() | st.integers(1, 12))
def test_visible_pairs(queries, past, window):
    """Counted one by one in the mask."""
    pairs = [
        (query, key)
        for query in range(past, past + queries)
        for key in range(query + 1)
        if window is None or query - key < window
    ]
    assert costs.visible_pairs(queries, past, window) == len(pairs)


def test_costs_of_published_models():
    """By hand. SmolLM2: 30 layers, D 576, F 1536, 3 key/value heads of 64, V 49152."""
    config = DecoderConfig.from_hf(CONFIGS / "smollm2-135m.json")
    one = costs.feed_forward_cost(config, tokens=2048, itemsize=2)
    assert one.flops == 6 * 2048 * 576 * 1536
    assert one.bytes == 2 * (3 * 576 * 1536 + 2 * 2048 * 576)
    assert costs.cache_bytes(config, batch=1, length=1, itemsize=4) == 2 * 30 * 3 * 64 * 4
    parts = {p.part: p for p in costs.decode_costs(config, batch=3, length=100, itemsize=2)}
    assert parts["logits"].flops == 3 * 2 * 576 * 49152
    assert parts["logits"].bytes == 2 * (49152 + 3) * 576 + 3 * 4 * 49152
    assert parts["attention"].flops == 30 * 3 * 4 * 9 * 64 * 100
    # Gemma 3: 22 of 26 layers keep 512 tokens, and one head of 256.
    config = DecoderConfig.from_hf(CONFIGS / "gemma-3-1b-it.json")
    held = costs.cache_bytes(config, batch=2, length=2048, itemsize=2)
    assert held == 2 * 2 * 256 * 2 * (22 * 512 + 4 * 2048)
    # Mixtral: one token meets 2 of 8 experts, 100 tokens meet them all.
    config = DecoderConfig.from_hf(CONFIGS / "mixtral-8x7b-v0.1.json")
    for tokens, experts in ((1, 2), (100, 8)):
        one = costs.feed_forward_cost(config, tokens=tokens, itemsize=2)
        assert one.flops == 2 * 6 * tokens * 4096 * 14336
        assert one.bytes == 2 * (experts * 3 * 4096 * 14336 + 2 * tokens * 4096)


# inspect ------------------------------------------------------------------------------------------


def test_inspect_reads_headers_and_reports_the_gap(folder, tmp_path, monkeypatch):
    """B75, and a table that adds up to the file."""
    monkeypatch.setattr(Origin, "view", fail)
    file = tmp_path / "inspect.json"
    result = run("inspect", folder, "--length", 5, "--batch", 2, "--json", file)
    assert result.exit_code == 0, result.output
    assert "\u2026" not in result.stdout and "\x1b" not in result.stdout
    assert not [line for line in result.stdout.splitlines() if line != line.rstrip()]
    text = " ".join(result.stdout.split())
    assert "GAP: 264 tokens, largest id 263, and the table has 261 rows. 3 tokens have" in text
    assert "<over> 261, <board> 262, <gone> 263" in text
    found = json.loads(file.read_text())
    assert "GAP: pad_token_id is 261, and the table has 261 rows" in text
    config = config_of(tie_word_embeddings=True, eos_token_id=256, pad_token_id=261)
    shapes = {"/".join(path): list(shape) for path, shape in flatten(config.parameter_shapes())}
    assert {leaf: about["shape"] for leaf, about in found["parameters"].items()} == shapes
    assert {about["dtype"] for about in found["parameters"].values()} == {"bfloat16"}
    header = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert found["num_bytes"] == found["files"]["model.safetensors"] - 8 - header
    assert found["num_bytes"] == 2 * found["num_parameters"] == found["memory"]["parameters"]
    assert found["memory"]["cache"] == costs.cache_bytes(config, batch=2, length=5, itemsize=2)
    assert found["config"] == config.to_hf() and found["tie"].startswith("tied: one table")
    assert found["feed_forward"]["prefill"]["flops"] == 6 * 10 * 12 * 7
    assert "6 T D F = 6 x 10 x 12 x 7 = 5.04 kFLOPs" in text
    for step in found["costs"].values():
        assert step["flops"] == sum(part["flops"] for part in step["parts"])


def test_inspect_of_configurations_alone(tmp_path):
    text = run("inspect", CONFIGS / "gemma-3-1b-it.json").stdout
    assert "4 times (5 sliding over 512 tokens, 1 full), then 2 times (1 sliding" in " ".join(
        text.split()
    )
    assert "26.6 kB, 4.1 kB once the windows are full" in text and "in bfloat16" in text
    meta = tmp_path / "params.json"
    meta.write_bytes((CONFIGS / "meta-llama-3.2-1b.params.json").read_bytes())
    message = refused("inspect", meta)
    assert "\n- the argument tie_word_embeddings is missing" in message
    assert "--tie or --no-tie, --vocab-size, --rope-scaling-factor" in message
    result = run("inspect", tmp_path, "--tie", "--rope-scaling-factor", 32)
    assert "1,235,814,400" in result.stdout and "scaled as llama3" in result.stdout
    assert "in float32, for nothing says which" in result.stdout


def test_every_published_model_is_described():
    files = [path for path in CONFIGS.glob("[a-z]*.json") if ".params" not in path.name]
    assert len(files) > 10
    for file in files:
        config = DecoderConfig.from_hf(file)
        words = describe(config)
        for number in (config.vocab_size, config.hidden_size, config.num_parameters()):
            assert f"{number:,}" in " ".join(words.values()), file
        assert ("untied" in words["embedding"]) != config.tie_word_embeddings


# convert ------------------------------------------------------------------------------------------


def contents_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_to_orbax_and_back_is_the_identity(folder, tmp_path):
    there, back = tmp_path / "orbax", tmp_path / "back"
    result = run("convert", folder, there, "--to", "orbax")
    assert result.exit_code == 0 and result.stdout == "", result.output
    assert "tied: one table" in result.stderr and "Wrote " in result.stderr
    assert run("convert", there, back).exit_code == 0
    assert contents_of(back) == contents_of(folder)
    # What is there already is replaced only if that is asked for, by either kind.
    assert "unless there is --overwrite" in refused("convert", folder, there)
    assert run("convert", folder, there, "--to", "orbax", "--overwrite").exit_code == 0
    assert orbax_folder.is_orbax(there)
    assert run("inspect", there).exit_code == 0
    assert run("convert", folder, there, "--overwrite", "--dtype", "float32").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "orbax"]
    assert contents_of(there).keys() == contents_of(folder).keys()
    assert json.loads((there / "config.json").read_text())["dtype"] == "float32"


def test_an_orbax_folder_is_read_strictly(folder, tmp_path, monkeypatch):
    config = config_of()
    params = random_params(config)
    target = tmp_path / "orbax"
    orbax_folder.save_orbax(target, config, params)
    back_config, back = orbax_folder.load_orbax(target)
    assert back_config == config
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(params)))
    with pytest.raises(FileExistsError, match="must be new or empty"):
        orbax_folder.save_orbax(target, config, params)
    # A tree of another configuration: with one leaf too many, and of another shape.
    other = dataclasses.replace(config, tie_word_embeddings=True, vocab_size=17)
    (target / "config.json").write_text(json.dumps(other.to_hf()))
    with pytest.raises(CheckpointError) as raised:
        orbax_folder.load_orbax(target)
    assert len(raised.value.findings) == 2
    assert re.match(r"unembedding is unexpected", raised.value.findings[1])
    assert re.match(r"embedding must have the shape \[17, 12\]; got", raised.value.findings[0])
    assert refused("inspect", target).count("\n- ") == 2
    # A writer that fails leaves the old folder as it was.
    monkeypatch.setattr(orbax_folder.shutil, "copyfile", fail)
    with pytest.raises(OSError, match="no space"):
        orbax_folder.save_orbax(target, config, params, tokenizer_from=folder, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["orbax"]
    with pytest.raises(CheckpointError, match="unembedding is unexpected"):
        orbax_folder.load_orbax(target)
    # Damaged, and gone.
    (target / "config.json").write_text(json.dumps(config.to_hf()))
    for file in (target / "params").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="must be a folder that Orbax can read"):
        orbax_folder.load_orbax(target)


@pytest.mark.torch
def test_metas_pickled_shards_are_converted(tmp_path):
    """consolidated.00.pth, made by the table of the layout, to the folder that `save_checkpoint`
    writes of the same parameters."""
    import torch

    entries = {"dim": 12, "n_layers": 2, "n_heads": 3, "n_kv_heads": 1, "vocab_size": 261}
    entries |= {"multiple_of": 1, "norm_eps": 1e-5}
    config = DecoderConfig.from_meta(entries, tie_word_embeddings=False)
    params = random_params(config)
    leaves = {"/".join(path): np.asarray(leaf) for path, leaf in flatten(params)}

    def stored(placed):
        (part,) = placed.parts
        return part.in_stored_order(leaves[part.leaf][part.index]).reshape(placed.shape)

    source = tmp_path / "meta"
    source.mkdir()
    (source / "params.json").write_text(json.dumps(entries))
    tensors = {placed.name: torch.tensor(stored(placed)) for placed in placements(config, META)}
    torch.save(tensors, source / "consolidated.00.pth")
    result = run("convert", source, tmp_path / "converted")
    assert result.exit_code == 0 and "none in " in result.stderr, result.output
    save_checkpoint(tmp_path / "saved", config, params)
    assert contents_of(tmp_path / "converted") == contents_of(tmp_path / "saved")


def test_what_convert_refuses(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    target = tmp_path / "target"
    assert "which is not there" in refused("convert", tmp_path / "nothing", target)
    assert refused("convert", tmp_path / "empty", target).count("\n- ") == 2
    assert "without a config.json" in refused("convert", folder, tmp_path / "mine", "--overwrite")
    assert "must not be in TARGET" in refused("convert", folder, folder.parent, "--overwrite")
    assert "a number from 1 and a unit" in refused("convert", folder, target, "--max-shard-size=5")
    assert "goes with --to hf" in refused(
        *("convert", folder, target, "--to", "orbax", "--max-shard-size", "5GB")
    )
    assert "rope_scaling_factor must come with" in refused(
        "convert", folder, target, "--rope-scaling-factor", 8
    )
    assert not target.exists() and (tmp_path / "mine" / "letter.txt").exists()


# generate -----------------------------------------------------------------------------------------


TOKENIZERS = {"byte level": byte_level(), "sentence pieces": sentence_pieces()}


def streamed(tokenizer, prompt, new):
    text = stream.TextStream(tokenizer, prompt)
    return [*(text.push(token) for token in new), text.end()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.text(), st.text())
def test_streamed_text_is_the_text(name, before, after):
    """Characters of several tokens come whole, and no space is lost or added."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(f"{before} \u00e9\U0001f44d\U0001f3fd {after}").ids
    whole = tokenizer.decode(ids)
    for cut in {0, 1, len(ids) // 2, len(ids)}:
        pieces = streamed(tokenizer, ids[:cut], ids[cut:])
        shown = tokenizer.decode(ids[:cut])
        if "\ufffd" in shown + before + after:
            continue  # A prompt that ends inside a character.
        assert shown + "".join(pieces) == whole
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255)), st.lists(st.integers(0, 255)))
def test_streamed_nonsense_is_decoded_like_all_of_it(prompt, new):
    """Bytes that are no text, as a bad model gives them."""
    tokenizer = TOKENIZERS["byte level"]
    before = tokenizer.decode(prompt)
    text = before + "".join(streamed(tokenizer, prompt, new))
    if not before.endswith("\ufffd"):
        assert text == tokenizer.decode(prompt + new)


def test_generate(folder, monkeypatch):
    """The prompt from either place, the text of every token, and an end by the file for that."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    programs, tokens = [], []
    compile_stream, stream_tokens = stream.compile_stream, stream.stream_tokens

    def compile_once(*arguments, **keywords):
        if not programs:
            programs.append(compile_stream(*arguments, **keywords))
        return programs[0]

    def record(*arguments, **keywords):
        for token in stream_tokens(*arguments, **keywords):
            tokens.append(token)
            yield token

    monkeypatch.setattr(stream, "compile_stream", compile_once)
    monkeypatch.setattr(stream, "stream_tokens", record)
    command = ("generate", folder, "--max-new-tokens", 29)
    result = run(*command, "--prompt", "Hi")
    assert result.exit_code == 0, result.output
    ids, first = tokenizer.encode("Hi").ids, tokens.copy()
    shown = first[:-1] if first[-1] == 256 else first
    assert len(set(shown)) > 3
    assert result.stdout == "".join(streamed(tokenizer, ids, shown)) + "\n"
    assert "31 tokens may be read, and the model was made for 30" in result.stderr
    assert "Prompt: 2 tokens. First new token after " in result.stderr
    assert "tokens/s" in result.stderr

    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [first[5]]}))
    tokens.clear()
    result = run(*command, input="Hi\n")
    (folder / "generation_config.json").unlink()
    stop = first.index(first[5])
    assert tokens == first[: stop + 1]
    assert result.stdout == "".join(streamed(tokenizer, ids, first[:stop])) + "\n"
    assert f"{stop + 1} new tokens (ended by {tokenizer.id_to_token(first[5])})" in result.stderr


def test_a_stream_draws_what_generate_draws():
    config = config_of(num_hidden_layers=1)
    params, key = random_params(config), jax.random.key(3)
    tokens = jnp.asarray([[5, 250, 0]])
    setting = dict(sampler=partial(ops.top_k, k=50, temperature=2.0), key=key)
    wanted = generate(params, tokens, config, max_new_tokens=6, **setting)[0, 3:].tolist()
    assert len(set(wanted)) > 3
    programs = stream.compile_stream(params, tokens, config, max_new_tokens=6, **setting)
    go = partial(stream.stream_tokens, programs, params, tokens, max_new_tokens=6)
    assert list(go(key=key)) == wanted
    assert list(go(key=key, stop_tokens=wanted[2:3])) == wanted[: wanted.index(wanted[2]) + 1]
    assert list(go(key=jax.random.key(4))) != wanted
    spoilt = {**params, "embedding": params["embedding"] * jnp.nan}
    assert list(stream.stream_tokens(programs, spoilt, tokens, max_new_tokens=6, key=key)) == [-1]


def test_what_generate_refuses(folder, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(config_of().to_hf()))
    generate_in = partial(refused, "generate")
    assert "must be a folder that can be read" in generate_in(tmp_path / "none", "--prompt", "a")
    assert "config.json (No such file" in generate_in(tmp_path, "--prompt", "a")
    assert "must hold a tokenizer.json" in generate_in(bare, "--prompt", "a")
    (bare / "tokenizer.json").write_text("{}")
    assert "must be able to read" in generate_in(bare, "--prompt", "a")
    assert "at least one token" in generate_in(folder, "--prompt", "")
    assert "at least one token" in generate_in(folder, input="\n")
    assert "must be text in UTF-8" in generate_in(folder, input=b"a\xff")
    assert "must be text in UTF-8" in generate_in(folder, "--prompt", "a\udcff")
    assert "got the token 263" in generate_in(folder, "--prompt", "a<gone>")
    assert "--top-k or --top-p" in generate_in(folder, "--prompt=a", "--top-k=2", "--top-p=0.5")
    assert "must not exceed V=261" in generate_in(folder, "--prompt=a", "--top-k=262")
    for option in ("--top-p=0", "--temperature=inf", "--temperature=-1", "--max-new-tokens=0"):
        assert option.split("=")[0] in generate_in(folder, "--prompt=a", option)


# The command line itself --------------------------------------------------------------------------


def test_help_names_every_option():
    listed = run("--help").stdout
    for command in cli.app.registered_commands:
        name = command.callback.__name__
        assert re.search(rf"^ +{name} +\w+", listed, re.MULTILINE)
        text = run(name, "--help").stdout
        assert "Exit status: 0" in text
        options = [
            option
            for annotation in command.callback.__annotations__.values()
            for about in getattr(annotation, "__metadata__", ())
            for option in about.param_decls or ()
            if option.startswith("--")
        ]
        assert all(option.split("/")[0] in text for option in options)


def test_the_command_line_is_light_until_a_command_runs():
    heavy = ["torch", "transformers", "flax", "orbax", "tokenizers", "gguf", "tensorstore"]
    code = f"import sys, jaxblock.cli; print([n for n in {heavy} if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
