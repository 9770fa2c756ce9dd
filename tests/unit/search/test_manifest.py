from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from sorl_trl.search import BM25Index, IndexCorrupted
from sorl_trl.search.engines.bm25 import INDEX_FILES
from sorl_trl.search.engines.manifest import (
    Manifest,
    check_manifest,
    fingerprint,
    library_series,
    read_manifest,
    write_manifest,
)

NUM_DOCUMENTS = 7


@pytest.fixture
def copy(index_dir, tmp_path):
    return shutil.copytree(index_dir, tmp_path / "copy")


def edit_manifest(directory, **changes):
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def sign(directory):
    """Write the manifest anew over changed files: only the checks beyond the hash are left."""
    write_manifest(directory, INDEX_FILES, read_manifest(directory))


def edit_array(directory, name, change):
    array = np.load(directory / name)
    np.save(directory / name, change(array), allow_pickle=True)
    sign(directory)


def assert_corrupted(directory, message):
    with pytest.raises(
        IndexCorrupted, match=f"(?s){directory}: .*{message}.*delete the directory and build the index"
    ):
        BM25Index.load(directory)


def test_what_the_manifest_records(corpus_path, index_dir):
    manifest = json.loads((index_dir / "manifest.json").read_text())
    assert (manifest["engine"], manifest["library"]) == ("bm25", "bm25s 0.3")
    assert manifest["sources"] == [fingerprint(corpus_path)]
    assert manifest["num_documents"] == NUM_DOCUMENTS
    assert set(manifest["files"]) == set(INDEX_FILES)
    assert {path.name for path in index_dir.iterdir()} == {*INDEX_FILES, "manifest.json"}
    for name, recorded in manifest["files"].items():
        assert recorded["bytes"] == (index_dir / name).stat().st_size


@pytest.mark.parametrize("name", INDEX_FILES)
def test_a_flipped_bit_is_found(copy, name):
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    assert_corrupted(copy, f"{name} has changed")


@pytest.mark.parametrize("name", INDEX_FILES)
def test_a_truncated_file_is_found(copy, name):
    (copy / name).write_bytes((copy / name).read_bytes()[:-1])
    assert_corrupted(copy, f"{name} has changed")


@pytest.mark.parametrize("name", INDEX_FILES)
def test_a_deleted_file_is_found(copy, name):
    (copy / name).unlink()
    assert_corrupted(copy, f"{name} is missing")


def test_a_directory_without_a_manifest_is_not_to_be_deleted(copy):
    """It may be anything."""
    (copy / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"there is none, for manifest\.json is missing; name another") as refusal:
        BM25Index.load(copy)
    assert "delete" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 1, "unknown": 1}, "format_version 1, allowed is 2"),
        ({"library": "bm25s 0.1"}, "library 'bm25s 0.1', installed is 'bm25s 0.3'"),
        ({"num_documents": "7"}, "needs an integer `num_documents`"),
        ({"num_documents": 8}, "7 passages, 7 scored, 8 in the manifest"),
        ({"files": []}, "an object `files`"),
        ({"files": dict.fromkeys(INDEX_FILES, 1)}, "corpus.jsonl has changed: manifest.json says 1"),
        ({"files": {}}, "corpus.jsonl has changed: manifest.json says None"),
        ({"more": 1}, "not a manifest"),
    ],
)
def test_a_manifest_that_does_not_fit_is_found(copy, changes, message):
    edit_manifest(copy, **changes)
    assert_corrupted(copy, message)


@pytest.mark.parametrize("content", ["", "[]", "{}", "3", "\x00"])
def test_a_file_that_is_no_manifest_is_found(copy, content):
    (copy / "manifest.json").write_text(content)
    assert_corrupted(copy, "manifest.json is not a manifest")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("indices.csc.index.npy", lambda a: a - 1, "document index out of bounds"),
        ("indices.csc.index.npy", lambda a: a + 2, "document index out of bounds"),
        ("indices.csc.index.npy", lambda a: a[:-1], "posting lists out of bounds"),
        ("indptr.csc.index.npy", lambda a: a[::-1], "posting lists out of bounds"),
        ("indptr.csc.index.npy", lambda a: a[:0], "do not fit together"),
        ("indptr.csc.index.npy", lambda a: np.delete(a, 1), "vocabulary out of bounds"),
        ("data.csc.index.npy", lambda a: a.astype(object), "do not fit together"),
    ],
)
def test_arrays_that_do_not_fit_are_found_even_if_signed(copy, name, change, message):
    edit_array(copy, name, change)
    assert_corrupted(copy, message)


@pytest.mark.parametrize(("name", "content"), [("vocab.index.json", "[]"), ("params.index.json", '{"num_docs": 1}')])
def test_json_that_does_not_fit_is_found_even_if_signed(copy, name, content):
    (copy / name).write_text(content)
    sign(copy)
    with pytest.raises(IndexCorrupted, match="do not fit together"):
        BM25Index.load(copy)


def test_a_directory_that_is_not_there_is_no_corruption(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"index_dir .*nowhere is not a directory; build the index first"):
        BM25Index.load(tmp_path / "nowhere")


def test_an_index_of_another_engine_is_not_taken_for_corrupted(copy):
    edit_manifest(copy, engine="other")
    with pytest.raises(ValueError, match=r"made by the engine 'other', not 'bm25'; use `open_index`") as caught:
        BM25Index.load(copy)
    assert not isinstance(caught.value, IndexCorrupted)


def test_a_fingerprint_worked_by_hand(tmp_path):
    (tmp_path / "file").write_bytes(b"abc" * 1_000_000)
    expected = hashlib.sha256(b"abc" * 1_000_000).hexdigest()
    assert fingerprint(tmp_path / "file") == {"sha256": expected, "bytes": 3_000_000}


def test_files_above_the_size_given_are_not_hashed(tmp_path):
    """What a flipped bit in one of them costs: it is not found."""
    for name in ("small", "large"):
        (tmp_path / name).write_bytes(name.encode() * len(name))
    write_manifest(tmp_path, ("small", "large"), Manifest("e", "l 1", 1, []))
    (tmp_path / "large").write_bytes(b"LARGE" * 5)
    check_manifest(tmp_path, "e", "l 1", (), hashed_bytes=24)
    with pytest.raises(IndexCorrupted, match="large has changed"):
        check_manifest(tmp_path, "e", "l 1", (), hashed_bytes=25)
    (tmp_path / "large").write_bytes(b"large")
    with pytest.raises(IndexCorrupted, match="large has changed"):
        check_manifest(tmp_path, "e", "l 1", (), hashed_bytes=0)


def test_identity_follows_the_content_alone():
    manifest = Manifest("e", "l 1", 1, [], {"model": "m"}, {"file": {"sha256": "a", "bytes": 1}})
    assert manifest.identity.startswith("e-")
    assert len(manifest.identity) == 18
    assert replace(manifest, sources=[{"sha256": "b", "bytes": 1}]).identity == manifest.identity
    others = [
        replace(manifest, files={"file": {"sha256": "b", "bytes": 1}}),
        replace(manifest, settings={"model": "n"}),
        replace(manifest, library="l 2"),
        replace(manifest, engine="f"),
    ]
    assert len({other.identity for other in (*others, manifest)}) == 5


def test_a_series_is_a_minor_version():
    assert library_series("bm25s") == "bm25s 0.3"
    with pytest.raises(ImportError):
        library_series("no-such-distribution")
