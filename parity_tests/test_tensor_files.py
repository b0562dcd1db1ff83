"""Files of tensors: safetensors, folders of them, GGUF; and folders replaced in one step.

Each kind of file is checked against the library that others write it with, then with everything
that can be wrong with it, and with thousands of random damages (`Damage` below).
"""

import contextlib
import json
import os
import random
import re
import struct
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jaxblock.checkpoint import atomic
from jaxblock.checkpoint.findings import MAX_SHOWN, CheckpointError, checkpoint_error
from jaxblock.checkpoint.folder import open_hugging_face, open_meta
from jaxblock.checkpoint.gguf_file import open_gguf
from jaxblock.checkpoint.safetensors_file import DTYPES, open_safetensors, write_safetensors
from jaxblock.checkpoint.stored import MAPPED

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def header_and(values, header):
    """A safetensors file of this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path, *arrays, **more):
    """A safetensors file of the arrays a, b, c and so on, through our own writer."""
    named = {**{"abcdefgh"[i]: array for i, array in enumerate(arrays)}, **more}
    tensors = {
        name: (array.dtype, array.shape, lambda array=array: array) for name, array in named.items()
    }
    write_safetensors(path, tensors, {"format": "pt"})


def opened(path):
    findings = []
    tensors = open_safetensors(path, findings)
    assert not findings, findings
    return tensors


def same(tensor, array):
    assert (tensor.dtype, tensor.shape) == (array.dtype, array.shape)
    values = tensor.read()
    assert (values.dtype, values.shape) == (array.dtype, array.shape)
    assert values.tobytes() == array.tobytes()


FLOAT = np.arange(6, dtype=np.float32).reshape(2, 3)


# safetensors --------------------------------------------------------------------------------------


def test_bfloat16_to_the_byte(tmp_path):
    """Scenario B83, written by hand."""
    content = header_and(b"\x80\x3f\x40\xc0", {"a": entry("BF16", [2], 0, 4)})
    (tmp_path / "hand").write_bytes(content)
    values = opened(tmp_path / "hand")["a"].read()
    assert values.dtype == BFLOAT16
    assert values.astype(np.float32).tolist() == [1, -3]
    write(tmp_path / "ours", values)
    assert (tmp_path / "ours").read_bytes()[-4:] == content[-4:]
    same(opened(tmp_path / "ours")["a"], values)


def test_our_files_are_the_librarys(tmp_path):
    """Every dtype, and shapes () and (0, 3): the same bytes as the library writes."""
    generator = np.random.default_rng(0)
    arrays = {}
    for name, dtype in DTYPES.items():
        values = generator.integers(0, 2, (3, 5)).astype(dtype)
        arrays |= {f"{name}.é": values, f"{name}.empty": values[:0], name: values[0, 0]}
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    write(tmp_path / "ours", **arrays)
    safetensors.numpy.save_file(arrays, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    tensors = opened(tmp_path / "theirs")
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        same(tensors[name], array)
        assert not (array.size and tensors[name].read().flags.writeable)


def test_reading_and_writing_hold_one_tensor(tmp_path):
    """16 tensors of 1 MiB, the last in four pieces: the header alone is read before they are."""
    size = 2**20
    tensors = {
        f"t{i:02d}": (np.uint8, (size,), lambda i=i: np.full(size, i, np.uint8)) for i in range(15)
    }
    tensors["t15"] = (np.uint8, (size,), (np.full(size // 4, 15, np.uint8) for _ in range(4)))
    tracemalloc.start()
    try:
        write_safetensors(tmp_path / "big", tensors, {})
        assert tracemalloc.get_traced_memory()[1] < 1.5 * size
        tracemalloc.reset_peak()
        stored = opened(tmp_path / "big")
        assert tracemalloc.get_traced_memory()[1] < size / 4
        for i, tensor in enumerate(stored.values()):
            values = tensor.read()
            assert values[0] == values[-1] == i
            del values
        assert tracemalloc.get_traced_memory()[1] < 1.5 * size
    finally:
        tracemalloc.stop()


def test_reading_a_large_tensor_maps_it(tmp_path):
    write(tmp_path / "big", a=np.arange(MAPPED, dtype=np.uint8))
    (tensor,) = opened(tmp_path / "big").values()
    tracemalloc.start()
    try:
        values = tensor.read()
        assert tracemalloc.get_traced_memory()[1] < MAPPED / 16
    finally:
        tracemalloc.stop()
    same(tensor, np.arange(MAPPED, dtype=np.uint8))
    assert not values.flags.writeable


@pytest.mark.parametrize(
    ("dtype", "shape", "source", "match"),
    [
        (
            np.float32,
            (2,),
            lambda: np.zeros(2, np.float16),
            r"must be float32\[2\]; got an array float16",
        ),
        (np.float32, (2,), lambda: np.zeros((1, 2), np.float32), r"got an array float32\[1, 2\]"),
        (np.float32, (2,), [np.zeros(1, np.float32)], "must make up .* got 4 bytes less"),
        (np.float32, (2, 2), [np.zeros((1, 3), np.float32)], r"got an array float32\[1, 3\]"),
        (np.complex64, (2,), lambda: np.zeros(2, np.complex64), "got 'a' of dtype complex64"),
    ],
)
def test_what_is_written_is_what_was_announced(tmp_path, dtype, shape, source, match):
    with pytest.raises(ValueError, match=f"write_safetensors: .*{match}"):
        write_safetensors(tmp_path / "f", {"a": (dtype, shape, source)}, {})


F32 = entry("F32", [1], 0, 4)
A = json.dumps(F32)

# What is wrong: (the file, what the finding says).
BAD_SAFETENSORS = {
    "empty": (b"", "header .* must take .* got 0 bytes"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "header .* of 7 bytes"),
    "header beyond the file": (b"\xff" * 7 + b"\x7f{}", "got 9223372036854775807 bytes"),
    "header over the limit": (header_and(b"", b" " * 10**3)[1:], "got .* bytes in"),
    "no text": (header_and(b"", b""), "got 0 bytes"),
    "not JSON": (header_and(b"", b'{"a'), "must be JSON in UTF-8"),
    "not UTF-8": (header_and(b"", b'{"\xff": 1}'), "must be JSON in UTF-8"),
    "UTF-16": (header_and(b"", "{}".encode("utf-16")), "must be JSON in UTF-8"),
    "deep": (header_and(b"", b"[" * 10**5), "nested too deep"),
    "not an object": (header_and(b"", [F32]), "must be a JSON object"),
    "space first": (header_and(b"\0" * 4, f' {{"a": {A}}}'.encode()), "must be a JSON object"),
    "a number of 5000 digits": (header_and(b"", b'{"a": ' + b"9" * 5000 + b"}"), "must be JSON"),
    "twice": (
        header_and(b"\0" * 4, f'{{"a": {A}, "a": {A}}}'.encode()),
        "the key 'a' is given twice",
    ),
    "twice inside": (
        header_and(b"\0" * 4, f'{{"a": {A[:-1]}, "dtype": "I32"}}}}'.encode()),
        "the key 'dtype' is given twice",
    ),
    "half a surrogate": (header_and(b"\0" * 4, {"\ud800": F32}), "Unicode text; got"),
    "no dtype": (header_and(b"", {"a": {"shape": [], "data_offsets": [0, 4]}}), "must have dtype"),
    "one key too many": (header_and(b"\0" * 4, {"a": {**F32, "b": 1}}), "and nothing else"),
    "not a mapping": (header_and(b"", {"a": [1]}), r"must have dtype.* got \[1\] for 'a'"),
    "dtype a number": (header_and(b"\0" * 4, {"a": entry(7, [1], 0, 4)}), "must be a name"),
    "negative": (header_and(b"\0" * 4, {"a": entry("F32", [-1], 0, 4)}), "list of at most 8 sizes"),
    "negative pair": (
        header_and(b"\0" * 4, {"a": entry("F32", [-1, -1], 0, 4)}),
        "at most 8 sizes",
    ),
    "true": (header_and(b"\0" * 4, {"a": entry("F32", [True], 0, 4)}), "at most 8 sizes"),
    "fraction": (header_and(b"\0" * 4, {"a": entry("F32", [1.0], 0, 4)}), "at most 8 sizes"),
    "too many axes": (header_and(b"\0" * 4, {"a": entry("F32", [1] * 9, 0, 4)}), "at most 8 sizes"),
    "beyond 64 bits": (
        header_and(b"\0" * 4, {"a": entry("F32", [2**64], 0, 4)}),
        "at most 8 sizes",
    ),
    # 2^32 * 2^32 is 0 in 64 bits.
    "overflow": (header_and(b"", {"a": entry("F32", [2**32, 2**32], 0, 0)}), "can be counted"),
    "overflow beside 0": (header_and(b"", {"a": entry("F32", [0, 2**62], 0, 0)}), "can be counted"),
    "three places": (
        header_and(b"\0" * 4, {"a": {**F32, "data_offsets": [0, 4, 4]}}),
        "two places",
    ),
    "backwards": (header_and(b"\0" * 4, {"a": {**F32, "data_offsets": [4, 0]}}), "two places"),
    "other size": (header_and(b"\0" * 8, {"a": entry("F32", [1], 0, 8)}), "lie 4 bytes apart"),
    "claimed terabytes": (
        header_and(b"\0" * 4, {"a": entry("F32", [2**38], 0, 2**40)}),
        "got 1099511627776 bytes of tensors .* room for 4. The file is cut off",
    ),
    "overlap": (
        header_and(b"\0" * 6, {"a": F32, "b": entry("F32", [1], 2, 6)}),
        "got 'b' at 2 after 'a', which ends at 4: they overlap",
    ),
    "the same place": (header_and(b"\0" * 4, {"a": F32, "b": F32}), "they overlap"),
    "hole": (
        header_and(b"\0" * 12, {"a": F32, "b": entry("F32", [1], 8, 12)}),
        "got 'b' at 8 after 'a', which ends at 4: they leave a hole",
    ),
    "hole in front": (header_and(b"\0" * 8, {"a": entry("F32", [1], 4, 8)}), "after the header"),
    "cut off": (header_and(b"\0" * 3, {"a": F32}), "room for 3. The file is cut off"),
    "rest": (
        header_and(b"\0" * 5, {"a": F32}),
        "got 4 bytes of tensors .* room for 5. Rest unknown",
    ),
    "metadata a list": (header_and(b"", {"__metadata__": []}), "must map names to strings"),
    "metadata of numbers": (
        header_and(b"", {"__metadata__": {"a": 1}}),
        "must map names to strings",
    ),
    "metadata null": (header_and(b"", {"__metadata__": None}), "must map names to strings"),
}


@pytest.mark.parametrize("what", BAD_SAFETENSORS)
def test_bad_safetensors(tmp_path, what):
    """In a folder, so as the one finding of an error; the library refuses them all too."""
    content, match = BAD_SAFETENSORS[what]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=match) as caught:
        open_hugging_face(tmp_path)
    assert len(caught.value.findings) == 1
    assert str(tmp_path / "model.safetensors") in str(caught.value)
    if what not in LIBRARY_TAKES:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(content)


# Where the library is less strict than we are.
LIBRARY_TAKES = {
    "twice",
    "space first",
    "one key too many",
    "too many axes",
    "overflow beside 0",
    "metadata null",
}


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F4", "C64", "f32", "\n" * 10**4])
def test_other_dtypes_are_refused_by_name(tmp_path, dtype):
    """One finding for all tensors of a dtype, beside those about other things."""
    names = {f"t{i}": entry(dtype, [4], 4 * i, 4 * i + 4) for i in range(100)}
    (tmp_path / "f").write_bytes(header_and(b"\0" * 401, names))
    findings = []
    assert open_safetensors(tmp_path / "f", findings) == {}
    shown = re.escape(repr(dtype)) if len(dtype) < 100 else r"'[\\n.]{100,200}'"
    got = f"got dtype={shown} for 't0' and 99 more in {tmp_path}/f. Convert it to BF16"
    assert re.search(got, findings[0])
    assert len(findings) == 2


def test_many_findings_stay_readable():
    error = checkpoint_error("load", [f"finding {i}" for i in range(10**4)])
    assert len(error.findings) == 10**4
    assert f"and {10**4 - MAX_SHOWN} more" in str(error)
    assert len(str(error).splitlines()) == MAX_SHOWN + 2


def test_what_is_not_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    names = ["pipe", "folder", "loop", "absent", "nul\0", "long" * 1000]
    for path in [*(tmp_path / name for name in names), Path(os.devnull)]:
        findings = []
        assert open_safetensors(path, findings) == {}
        assert re.search("must be a readable file; got .* \\(.+\\)", findings[0], re.DOTALL)
        with pytest.raises(CheckpointError, match="must be a readable file"):
            open_gguf(path)


@pytest.mark.parametrize("size", [6, MAPPED // 4])
def test_a_file_that_changes_is_refused(tmp_path, size):
    """Cut, exchanged or gone between the header and the values. Small tensors and mapped ones."""
    path = tmp_path / "f"
    write(path, np.zeros(size, np.float32))
    tensor = opened(path)["a"]
    kept = tensor.read()
    write(tmp_path / "other", np.ones(size, np.float32))
    os.replace(tmp_path / "other", path)
    with pytest.raises(CheckpointError, match="must not change while it is loaded"):
        tensor.read()
    tensor = opened(path)["a"]
    os.truncate(path, 100)
    with pytest.raises(CheckpointError, match="must not change while it is loaded"):
        tensor.read()
    path.unlink()
    with pytest.raises(CheckpointError, match="must stay readable .* No such file"):
        tensor.read()
    # What was read before lives on.
    assert not kept.any()


def test_without_maps(tmp_path, monkeypatch):
    """Some file systems have none, and each takes one of the files that a process may open."""

    asked = []

    def no_map(*arguments, **more):
        asked.append(arguments)
        raise OSError(24, "Too many open files")

    values = np.arange(MAPPED // 4, dtype=np.float32)
    write(tmp_path / "f", values)
    monkeypatch.setattr("mmap.mmap", no_map)
    same(opened(tmp_path / "f")["a"], values)
    assert asked


# Folders ------------------------------------------------------------------------------------------

SHARDS = [f"model-{i}-of-3.safetensors" for i in (1, 2, 3)]


@pytest.fixture
def sharded(tmp_path):
    """Three shards of one tensor each, a, b and c, and their index."""
    for i, (name, file) in enumerate(zip("abc", SHARDS, strict=True)):
        write(tmp_path / file, **{name: FLOAT + i})
    index = {"metadata": {"total_size": 72}, "weight_map": dict(zip("abc", SHARDS, strict=True))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def refused(folder, *matches, opener=open_hugging_face):
    with pytest.raises(CheckpointError) as caught:
        opener(folder)
    findings = caught.value.findings
    assert len(findings) == len(matches), findings
    for finding, match in zip(findings, matches, strict=True):
        assert re.search(match, finding), finding


def reindex(folder, **changes):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, file in changes.items():
        index["weight_map"][name] = file
        if file is None:
            del index["weight_map"][name]
    path.write_text(json.dumps(index))


def test_shards(sharded):
    notes = []
    tensors = open_hugging_face(sharded, notes=notes)
    for i, name in enumerate("abc"):
        same(tensors[name], FLOAT + i)
        assert tensors[name].file == sharded / SHARDS[i]
    assert notes == []
    # A single file comes first, as in transformers, and the rest is noted.
    write(sharded / "model.safetensors", FLOAT)
    assert list(open_hugging_face(sharded, notes=notes)) == ["a"]
    assert len(notes) == 4
    assert all("is not read" in note for note in notes)


def test_a_missing_shard_is_named(sharded):
    """Scenario B100, and what else is wrong comes with it."""
    (sharded / SHARDS[1]).unlink()
    os.truncate(sharded / SHARDS[2], (sharded / SHARDS[2]).stat().st_size - 1)
    refused(sharded, f"{SHARDS[1]} .No such file", f"{SHARDS[2]} with room for .*cut off")


def test_tensors_and_index_disagree(sharded):
    reindex(sharded, d=SHARDS[0], b=SHARDS[0], c=None)
    write(sharded / SHARDS[2], c=FLOAT, a=FLOAT)
    # The third shard is not named any more.
    refused(
        sharded, "'b' must be in .*model-1-of-3.* got a file without", "'d' must be in .*model-1"
    )
    reindex(sharded, d=None, b=SHARDS[1], e=SHARDS[2])
    refused(
        sharded,
        "'a' must be in one shard; got .*model-1-of-3.safetensors and .*model-3-of-3.safetensors",
        "must list every tensor; got 'c' in .*model-3",
        "'e' must be in .*model-3.* got a file without",
    )
    reindex(sharded, c=SHARDS[1], e=None, f=SHARDS[2])
    write(sharded / SHARDS[2], c=FLOAT, f=FLOAT)
    refused(sharded, "'c' must be in the shard that .* says, model-2.* got it in .*model-3")


def test_an_index_without_files(sharded):
    for file in SHARDS:
        (sharded / file).unlink()
    refused(sharded, *(f"{file} .No such file" for file in SHARDS))


TRICKS = [
    "../out.safetensors",
    "sub/../../out.safetensors",
    "./model-1-of-3.safetensors",
    "sub//x.safetensors",
    "/etc/x.safetensors",
    "C:x.safetensors",
    "..\\out.safetensors",
    "x\n.safetensors",
    "x\0.safetensors",
    "\ud800.safetensors",
    "config.json",
    "pytorch_model.bin",
    "",
    7,
    None,
    ["model-1-of-3.safetensors"],
]


def test_path_tricks_in_the_index(sharded, tmp_path_factory):
    weight_map = {"a": SHARDS[0], **{f"t{i}": trick for i, trick in enumerate(TRICKS)}}
    path = sharded / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    must = "must name .safetensors files inside the folder .* got "
    refused(sharded, *(f"{must}.* for 't{i}'" for i in range(len(TRICKS))))
    # A link out of the folder, of a file or of a folder.
    outside = tmp_path_factory.mktemp("outside")
    write(outside / "b.safetensors", FLOAT)
    (sharded / "b.safetensors").symlink_to(outside / "b.safetensors")
    (sharded / "sub").symlink_to(outside)
    path.write_text(json.dumps({"weight_map": {"a": "b.safetensors", "b": "sub/b.safetensors"}}))
    leads = "must lie inside its folder; got .*, which leads to .*outside"
    refused(sharded, leads, leads)


def test_links_of_the_hubs_cache(sharded, tmp_path_factory):
    """There every file is a link to a blob beside the snapshots; folders may be links too."""
    cache = tmp_path_factory.mktemp("models--owner--name")
    snapshot = cache / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for i, path in enumerate(sorted(sharded.iterdir())):
        path.rename(cache / "blobs" / f"{i}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    (sharded / "link").symlink_to(snapshot)
    assert (
        open_hugging_face(snapshot).keys()
        == open_hugging_face(sharded / "link").keys()
        == set("abc")
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "must be JSON"),
        ("[]", "must have a weight_map"),
        ('{"weight_map": {}}', "must have a weight_map"),
        ('{"weight_map": ["a"]}', "must have a weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' is given twice"),
        ('{"weight_map": {}, "weight_map": {}}', "'weight_map' is given twice"),
    ],
)
def test_bad_index(tmp_path, text, match):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, match)


def test_keys_given_twice_are_found_in_linear_time(tmp_path):
    pairs = ", ".join(f'"{i % 99_999}": "x.safetensors"' for i in range(10**5))
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{pairs}}}}}')
    refused(tmp_path, "the key '0' is given twice")


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ([], "must hold model.safetensors or model.safetensors.index.json; got an empty folder"),
        (["config.json"], "got config.json"),
        (
            ["pytorch_model.bin", "config.json"],
            "got pytorch_model.bin. Load it with .* save_pretrained",
        ),
        (["consolidated.00.pth"], "got consolidated.00.pth. .*`jaxblock convert`"),
        (["x.gguf"], "got x.gguf. Pass the path of the GGUF file"),
        (SHARDS[:2], "got model-1-of-3.safetensors, model-2.*need their index"),
        ([f"{i}.bin" for i in range(9)], r"got 0.bin, 1.bin, 2.bin, 3.bin, 4.bin, \.\.\.\. Load"),
    ],
)
def test_nothing_to_read(tmp_path, names, match):
    for name in names:
        (tmp_path / name).touch()
    refused(tmp_path, match)
    if SHARDS[0] not in names:
        refused(tmp_path, match.partition("got")[2], opener=open_meta)


def test_not_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for opener in (open_hugging_face, open_meta):
        refused(tmp_path / "absent", "must be a readable folder; got .*absent", opener=opener)
        refused(tmp_path / "file", "must be a readable folder; got .*file", opener=opener)
        refused(tmp_path / "nul\0", "must be a readable folder", opener=opener)


def test_meta_shards(tmp_path):
    """In the order of their numbers, of which none may be missing."""
    for i in range(11):
        write(tmp_path / f"consolidated.{i:02d}.safetensors", FLOAT + i)
    shards = open_meta(tmp_path)
    for i, shard in enumerate(shards):
        same(shard["a"], FLOAT + i)
    assert len(shards) == 11
    (tmp_path / "consolidated.07.safetensors").rename(tmp_path / "consolidated.safetensors")
    refused(tmp_path, "must be one file, or numbered once each", opener=open_meta)
    (tmp_path / "consolidated.safetensors").unlink()
    refused(tmp_path, "without a gap; .* no consolidated.07.safetensors", opener=open_meta)
    (tmp_path / "consolidated.7.safetensors").write_bytes(b"")
    refused(tmp_path, "the header .* must take", opener=open_meta)
    (tmp_path / "consolidated.007.safetensors").write_bytes(b"")
    refused(tmp_path, "numbered once each", "must take", opener=open_meta)
    for path in tmp_path.iterdir():
        path.unlink()
    write(tmp_path / "consolidated.safetensors", FLOAT)
    same(open_meta(tmp_path)[0]["a"], FLOAT)


# GGUF ---------------------------------------------------------------------------------------------


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def info(name, dims, kind, offset):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(*, metadata=(), infos=(), values=b"", magic=b"GGUF", version=3, counts=None, align=32):
    """A GGUF file, whatever it says; `metadata` are key, type and the bytes of the value."""
    num_tensors, num_entries = counts or (len(infos), len(metadata))
    content = magic + struct.pack("<IQQ", version, num_tensors, num_entries)
    for key, kind, value in metadata:
        content += text(key) + struct.pack("<I", kind) + value
    content += b"".join(infos)
    return content + b"\0" * (-len(content) % align) + values


def array(kind, count, values):
    return struct.pack("<IQ", kind, count) + values


def number(form, value):
    return struct.pack("<" + form, value)


METADATA = [
    ("general.alignment", 4, number("I", 64)),
    ("text", 8, text("é\0")),
    ("flag", 7, b"\1"),
    ("real", 6, number("f", 0.5)),
    ("long", 11, number("q", -1)),
    ("words", 9, array(8, 2, text("a") + text(""))),
    ("numbers", 9, array(5, 2, struct.pack("<ii", 1, -2))),
]
GOOD_GGUF = gguf(
    metadata=METADATA,
    infos=[info("b", [3, 2], 0, 64), info("a", [4], 30, 0)],
    values=b"\x80\x3f\x40\xc0" * 2 + b"\0" * 56 + FLOAT.tobytes(),
    align=64,
)


def test_gguf(tmp_path):
    """The first dimension of the file is the last axis."""
    (tmp_path / "f.gguf").write_bytes(GOOD_GGUF)
    file = open_gguf(tmp_path / "f.gguf")
    numbers = file.metadata.pop("numbers")
    assert numbers.tolist() == [1, -2]
    assert file.metadata == {
        "general.alignment": 64,
        "text": "é\0",
        "flag": True,
        "real": 0.5,
        "long": -1,
        "words": ["a", ""],
    }
    assert set(file.tensors) == {"a", "b"}
    same(file.tensors["a"], np.array([1, -3, 1, -3], BFLOAT16))
    same(file.tensors["b"], FLOAT)
    (tmp_path / "none.gguf").write_bytes(gguf(align=1))
    assert open_gguf(tmp_path / "none.gguf").tensors == {}


KINDS = ["F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "Q8_0", "Q4_0", "Q4_1"]
KINDS += ["Q5_0", "Q5_1", "Q6_K", "Q4_K", "TQ2_0"]


def test_gguf_against_the_package(tmp_path, monkeypatch):
    """Its writer, and its way to dequantise; ours in several chunks."""
    package = pytest.importorskip("gguf")
    from gguf import quants

    monkeypatch.setattr("jaxblock.checkpoint.gguf_file._CHUNK", 100)
    generator = np.random.default_rng(0)
    writer = package.GGUFWriter(tmp_path / "f.gguf", "llama")
    writer.add_array("words", ["a", "é"])
    expected = {}
    for name in KINDS:
        kind = package.GGMLQuantizationType[name]
        block, size = package.GGML_QUANT_SIZES[kind]
        if block == 1:
            dtype = BFLOAT16 if name == "BF16" else DTYPES[name]
            values = expected[name] = generator.integers(-99, 99, (3, 2, 5)).astype(dtype)
            raw = values.view(np.uint8)
        else:
            raw = generator.integers(0, 256, (3, 2, 2 * size), np.uint8)
            with np.errstate(all="ignore"):
                expected[name] = quants.dequantize(raw, kind)
            assert expected[name].shape == (3, 2, 2 * block)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "f.gguf")
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["words"] == ["a", "é"]
    assert list(file.tensors) == KINDS
    for name, values in expected.items():
        same(file.tensors[name], values)


def test_gguf_without_the_package(tmp_path, monkeypatch):
    """What is read with it only is refused by name, all of a type at once."""
    infos = [info("q", [256], 14, 0), info("p", [256], 14, 224), info("o", [32], 2, 448)]
    (tmp_path / "f.gguf").write_bytes(gguf(infos=infos, values=b"\0" * 480))
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="got Q6_K for 'q' and 1 more .*package gguf"):
        open_gguf(tmp_path / "f.gguf")


HUGE = 2**60
BAD_GGUF = {
    "empty": (b"", "the mark GGUF must fit into the file"),
    "another file": (b"PK\3\4" + b"\0" * 60, "must begin with b'GGUF'; got b'PK"),
    "cut after the mark": (b"GGUF\3\0", "the version must fit"),
    "version 1": (gguf(version=1), "version .* got 1 in"),
    "big-endian": (gguf(version=3 << 24), "The file is big-endian"),
    "2^60 entries": (gguf(counts=(0, HUGE)), "the metadata must fit .* got 1152921504606846976"),
    "2^60 tensors": (gguf(counts=(HUGE, 0)), "the list of tensors must fit"),
    "key of 2^60": (
        gguf(metadata=[("a", 4, b"")]).replace(text("a"), number("Q", HUGE) + b"a"),
        "a key of the metadata must fit",
    ),
    "text of 2^60": (gguf(metadata=[("a", 8, number("Q", HUGE))]), "the value of 'a' must fit"),
    "text not UTF-8": (gguf(metadata=[("a", 8, text(b"\xff"))]), "must be text in UTF-8"),
    "array of 2^60": (gguf(metadata=[("a", 9, array(0, HUGE, b""))]), "the value of 'a' must fit"),
    "2^60 words": (gguf(metadata=[("a", 9, array(8, HUGE, b""))]), "the value of 'a' must fit"),
    # 2^61 numbers of 8 bytes are 2^64 bytes.
    "overflow": (gguf(metadata=[("a", 9, array(12, 2**61, b""))]), "the value of 'a' must fit"),
    "nested": (gguf(metadata=[("a", 9, array(9, 1, array(0, 0, b"")))]), "numbers or strings"),
    "unknown value": (gguf(metadata=[("a", 13, b"")]), "type that GGUF knows; got type 13"),
    "key twice": (gguf(metadata=[("a", 7, b"\1")] * 2), "'a' must be given once"),
    "alignment 0": (gguf(metadata=[("general.alignment", 4, number("I", 0))]), "power of two"),
    "alignment 24": (gguf(metadata=[("general.alignment", 4, number("I", 24))]), "power of two"),
    "alignment 2^31": (
        gguf(metadata=[("general.alignment", 4, number("I", 2**31))]),
        "power of two",
    ),
    "alignment a word": (gguf(metadata=[("general.alignment", 8, text("a"))]), "power of two"),
    "split": (gguf(metadata=[("split.count", 2, number("H", 2))]), "got split.count=2 .*--merge"),
    "1000 dimensions": (
        gguf(infos=[info("a", [1] * 1000, 0, 0)], values=b"\0" * 4),
        "at most 4 dimensions; got 1000",
    ),
    "2^31 dimensions": (
        gguf(infos=[text("a") + struct.pack("<I", 2**31)], values=b"\0" * 64),
        "at most 4 dimensions",
    ),
    "no values": (gguf(infos=[info("a", [0], 0, 0)]), "must be at least 1"),
    "half a block": (gguf(infos=[info("a", [16, 2], 2, 0)], values=b"\0" * 18), "multiple of 32"),
    "2^40 values": (gguf(infos=[info("a", [2**40], 0, 0)], values=b"\0" * 4), "inside the file"),
    "2^64 bytes": (
        gguf(infos=[info("a", [2**31, 2**31], 0, 0)], values=b"\0" * 4),
        "inside the file",
    ),
    "offset of 2^63": (gguf(infos=[info("a", [1], 0, 2**63)], values=b"\0" * 4), "side by side"),
    "overlap": (
        gguf(infos=[info("a", [9], 0, 0), info("b", [1], 0, 32)], values=b"\0" * 36),
        "got 'b' at 32 after 'a', where 64 is next",
    ),
    "hole": (
        gguf(infos=[info("a", [1], 0, 0), info("b", [1], 0, 64)], values=b"\0" * 68),
        "got 'b' at 64 after 'a', where 32 is next",
    ),
    "twice": (
        gguf(infos=[info("a", [1], 0, 0), info("a", [1], 0, 32)], values=b"\0" * 36),
        "'a' must be in the file once",
    ),
    "cut off": (gguf(infos=[info("a", [2], 0, 0)], values=b"\0" * 7), "inside the file"),
    "rest": (gguf(infos=[info("a", [1], 0, 0)], values=b"\0" * 65), "33 more bytes"),
    "unknown type": (gguf(infos=[info("a", [1], 4, 0)], values=b"\0" * 4), "got number 4 for 'a'"),
    "a type without function": (gguf(infos=[info("a", [256], 15, 0)], values=b"\0" * 292), "Q8_K"),
    "name not UTF-8": (gguf(infos=[info(b"\xff", [1], 0, 0)], values=b"\0" * 4), "in UTF-8"),
}


@pytest.mark.parametrize("what", BAD_GGUF)
def test_bad_gguf(tmp_path, what):
    content, match = BAD_GGUF[what]
    (tmp_path / "f.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=match) as caught:
        open_gguf(tmp_path / "f.gguf")
    if what != "offset of 2^63":
        assert len(caught.value.findings) == 1, caught.value.findings
    assert str(tmp_path / "f.gguf") in str(caught.value)


# Random damage ------------------------------------------------------------------------------------

NASTY = [0, 1, 2, 3, 7, 8, 9, 255, 2**16, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


def damage(content, header, dice):
    """One to three damages, most of them in the header, which takes the first `header` bytes."""
    content = bytearray(content)
    for _ in range(dice.choice([1, 1, 2, 3])):
        place = dice.randrange(min(header, len(content)) if dice.random() < 0.9 else len(content))
        kind = dice.randrange(7)
        if kind == 0:
            content[place] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del content[place:]
        elif kind == 2:
            content[place:place] = dice.randbytes(dice.randrange(1, 9))
        elif kind == 3:
            del content[place : place + dice.randrange(1, 20)]
        elif kind == 4:
            content[place:place] = content[place : place + dice.randrange(60)]
        elif kind == 5:
            width = dice.choice([4, 8])
            value = dice.choice(NASTY) % 256**width
            content[place : place + width] = value.to_bytes(width, "little")
        elif digits := list(re.finditer(rb"[0-9]+", content[:header])):
            digit = dice.choice(digits)
            content[digit.start() : digit.end()] = str(dice.choice([*NASTY, -1, 1e9])).encode()
        if not content:
            break
    return bytes(content)


def survives(path, content, header, opener, *, tries, seed):
    """Damage the file again and again: the opener refuses, or gives what can be read.

    Yields what it gave for the contents that it took. Nothing else may be raised, and memory stays
    below a few megabytes whatever the file claims.
    """
    dice = random.Random(seed)
    taken = 0
    tracemalloc.start()
    try:
        for _ in range(tries):
            damaged = damage(content, header, dice)
            path.write_bytes(damaged)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                tensors = opener()
            except CheckpointError as error:
                assert error.findings
                assert len(str(error).encode()) < 30_000
            else:
                taken += 1
                for name, tensor in tensors.items():
                    values = tensor.read()
                    assert name == tensor.name
                    assert (values.dtype, values.shape) == (tensor.dtype, tensor.shape)
                yield damaged, tensors
            assert tracemalloc.get_traced_memory()[1] - before < 4 * 2**20
    finally:
        tracemalloc.stop()
    # Some damage is none, in a value or a name; most is.
    assert 0 < taken < tries / 2


def test_damaged_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, FLOAT, FLOAT.astype(BFLOAT16), np.arange(5), np.float32(1), np.zeros((0, 2)))
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")

    def opener():
        return open_hugging_face(tmp_path)

    for damaged, tensors in survives(path, content, header, opener, tries=1000, seed=0):
        # What we take, the library takes, and it sees the same.
        expected = dict(safetensors.deserialize(damaged))
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert list(tensor.shape) == expected[name]["shape"]
            assert tensor.dtype == DTYPES[expected[name]["dtype"]]
            assert tensor.read().tobytes() == bytes(expected[name]["data"])


def test_damaged_index(sharded):
    path = sharded / "model.safetensors.index.json"
    content = path.read_bytes()

    def opener():
        return open_hugging_face(sharded)

    for damaged, tensors in survives(path, content, len(content), opener, tries=400, seed=0):
        listed = json.loads(damaged)["weight_map"]
        assert {name: tensor.file.name for name, tensor in tensors.items()} == listed
        assert set(listed) == set("abc")


def test_damaged_gguf(tmp_path):
    path = tmp_path / "f.gguf"
    infos = [info("a", [4], 30, 0), info("b", [3, 2], 0, 32), info("c", [32], 2, 64)]
    content = gguf(metadata=METADATA[1:], infos=infos, values=b"\1" * 82)

    def opener():
        return open_gguf(path).tensors

    for damaged, tensors in survives(path, content, len(content) - 82, opener, tries=1000, seed=0):
        assert len(tensors) == int.from_bytes(damaged[8:16], "little")
        assert sum(tensor.read().nbytes for tensor in tensors.values()) < 8 * len(damaged)


# Folders replaced in one step ---------------------------------------------------------------------


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


OLD = {"config.json": "old", "stale-9-of-9": "old"}
NEW = {"config.json": "new", "model": "new"}


def fill(folder, files):
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(value)


@pytest.fixture(params=["exchange", "renames"])
def swap(request, monkeypatch):
    """Both ways to swap two folders."""
    if request.param == "renames":
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    elif sys.platform not in ("linux", "darwin"):
        pytest.skip("no exchange of names on this system")


def test_replace_folder(tmp_path, swap):
    """A new folder, an empty one, an old one with stale files, one behind a link."""
    for name in ("absent", "empty", "old", "deep/absent"):
        folder = tmp_path / name
        if name in ("empty", "old"):
            fill(folder, OLD if name == "old" else {})
            folder.chmod(0o750)
        with atomic.replace_folder(folder) as new:
            fill(new, NEW)
            if name == "old":
                assert contents(folder) == OLD
        assert contents(folder) == NEW
        if name == "old":
            assert folder.stat().st_mode & 0o777 == 0o750
    (tmp_path / "link").symlink_to("old")
    with atomic.replace_folder(tmp_path / "link") as new:
        fill(new, {"config.json": "newer"})
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "old") == {"config.json": "newer"}
    assert sorted(os.listdir(tmp_path)) == ["absent", "deep", "empty", "link", "old"]


def test_an_error_leaves_the_old_folder(tmp_path, swap, monkeypatch):
    fill(tmp_path / "f", OLD)

    def replace(folder):
        with atomic.replace_folder(folder) as new:
            fill(new, NEW)
            raise KeyboardInterrupt

    for folder, left in ((tmp_path / "f", ["f"]), (tmp_path / "g", ["f"])):
        with pytest.raises(KeyboardInterrupt):
            replace(folder)
        assert os.listdir(tmp_path) == left
        assert contents(tmp_path / "f") == OLD

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(OSError, match="No space left"),
        atomic.replace_folder(tmp_path / "f") as new,
    ):
        fill(new, NEW)
    assert os.listdir(tmp_path) == ["f"]
    assert contents(tmp_path / "f") == OLD


def test_the_second_rename_fails(tmp_path, monkeypatch):
    """The old folder is put back."""
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    fill(tmp_path / "f", OLD)
    rename = Path.rename

    def failing(self, target):
        if "-new-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output"), atomic.replace_folder(tmp_path / "f") as new:
        fill(new, NEW)
    assert os.listdir(tmp_path) == ["f"]
    assert contents(tmp_path / "f") == OLD


def test_everything_is_on_the_disk_before_the_swap(tmp_path, swap, monkeypatch):
    fill(tmp_path / "f", OLD)
    synced, fsync = [], os.fsync

    def record(number):
        where = "after" if contents(atomic.current(tmp_path / "f")) == NEW else "before"
        synced.append((os.fstat(number).st_ino, where))
        fsync(number)

    monkeypatch.setattr(os, "fsync", record)
    with atomic.replace_folder(tmp_path / "f") as new:
        fill(new, NEW)
        inodes = {path.stat().st_ino for path in (new, *new.iterdir())}
    assert {(inode, "before") for inode in inodes} <= set(synced)
    assert synced[-1] == (tmp_path.stat().st_ino, "after")


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"thesis.tex": ""}, "empty or a checkpoint, with a config.json; got .* with thesis.tex"),
        ({"config.json": "", "runs/": ""}, "a folder of files alone, .* with the folder runs"),
        (None, "must be a folder; got the file"),
    ],
)
def test_only_a_checkpoint_is_deleted(tmp_path, files, match):
    folder = tmp_path / "f"
    if files is None:
        folder.touch()
    else:
        for name in files:
            place = folder / name
            place.mkdir(parents=True) if name.endswith("/") else fill(folder, {name: ""})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match=match), atomic.replace_folder(folder):
        pytest.fail("the block is not entered")
    assert sorted(tmp_path.rglob("*")) == before


def test_not_the_folder_one_stands_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileExistsError, match="the program runs in"), atomic.replace_folder("."):
        pytest.fail("the block is not entered")


def test_two_writers(tmp_path, swap):
    """Neither takes the other's files for leftovers; the last one to finish wins."""
    fill(tmp_path / "f", OLD)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(atomic.replace_folder(tmp_path / "f"))
        with atomic.replace_folder(tmp_path / "f") as second:
            fill(second, {"config.json": "second"})
        assert contents(tmp_path / "f") == {"config.json": "second"}
        fill(first, NEW)
    assert contents(tmp_path / "f") == NEW
    assert os.listdir(tmp_path) == ["f"]


# Without jax, so that it may fork; atomic.py imports nothing of ours.
KILLED = """
    import importlib.util, json, os, pathlib, sys

    spec = importlib.util.spec_from_file_location("atomic", sys.argv[1])
    atomic = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(atomic)
    root, old, new = pathlib.Path(sys.argv[2]), *map(json.loads, sys.argv[3:5])
    if sys.argv[5] == "renames":
        atomic._exchange = lambda one, other: False
    os.fsync = lambda number: None  # The process dies here, not the machine.

    def write(files):
        with atomic.replace_folder(root / "f") as folder:
            for name, text in files.items():
                (folder / name).write_text(text)

    def contents(folder):
        return {path.name: path.read_text() for path in folder.iterdir()}

    def killed(last):
        step = 0

        def count(*ignored):
            nonlocal step
            step += 1
            if step == last:
                os._exit(9)

        def trace(frame, event, argument):
            if frame.f_code.co_filename == sys.argv[1]:
                count()
                return trace

        # Each line of the module, and each call of the system that it or shutil makes.
        sys.addaudithook(lambda event, _: count() if event.startswith(("os.", "shutil.")) else None)
        sys.settrace(trace)
        write(new)
        os._exit(0)

    steps, states, gone = 0, [], 0
    while True:
        steps += 1
        write(old)
        assert os.listdir(root) == ["f"], os.listdir(root)
        child = os.fork()
        if child == 0:
            killed(steps)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        gone += not (root / "f").exists()
        found = contents(atomic.current(root / "f"))
        assert found in (old, new), (steps, found)
        states.append(found == new)
        try:
            write({"no folder/x": ""})
        except FileNotFoundError:
            assert contents(root / "f") == found, "a writer that fails lost what the crash had left"
        if code == 0:
            break
        assert code == 9, code
    assert states == sorted(states), "new, then old again"
    print(json.dumps([steps, gone]))
"""


@pytest.mark.parametrize("way", ["exchange", "renames"])
def test_killed_at_every_step(tmp_path, way):
    """Old or new, never half and never none; the next writer leaves no trace of the crash."""
    arguments = [str(atomic.__file__), str(tmp_path), json.dumps(OLD), json.dumps(NEW), way]
    code = textwrap.dedent(KILLED)
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    steps, gone = json.loads(result.stdout)
    assert steps > 50
    # With renames there are moments at which only `current` finds the folder.
    assert (gone > 0) == (way == "renames" or sys.platform not in ("linux", "darwin"))
