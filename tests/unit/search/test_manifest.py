from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from sorl_trl.search import BM25Index, IndexCorrupted
from sorl_trl.search.bm25 import INDEX_FILES
from sorl_trl.search.manifest import write_manifest

NUM_DOCUMENTS = 7


@pytest.fixture
def copy(index_dir, tmp_path):
    return shutil.copytree(index_dir, tmp_path / "copy")


def edit_manifest(directory, **changes):
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_array(directory, name, change):
    """Change an array and sign it: only the checks beyond the hash are left."""
    array = np.load(directory / name)
    np.save(directory / name, change(array), allow_pickle=True)
    write_manifest(directory, INDEX_FILES, NUM_DOCUMENTS, source={})


def assert_corrupted(directory, message):
    with pytest.raises(
        IndexCorrupted, match=f"(?s){directory}: .*{message}.*delete the directory and build the index"
    ):
        BM25Index.load(directory)


def test_what_the_manifest_records(index_dir):
    manifest = json.loads((index_dir / "manifest.json").read_text())
    assert manifest["num_documents"] == NUM_DOCUMENTS
    assert set(manifest["files"]) == set(INDEX_FILES)
    assert {path.name for path in index_dir.iterdir()} == {*INDEX_FILES, "manifest.json"}
    for name, fingerprint in manifest["files"].items():
        assert fingerprint["bytes"] == (index_dir / name).stat().st_size


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


@pytest.mark.parametrize("name", [*INDEX_FILES, "manifest.json"])
def test_a_deleted_file_is_found(copy, name):
    (copy / name).unlink()
    assert_corrupted(copy, f"{name} is missing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 0}, "format_version 0, allowed is 1"),
        ({"bm25s_version": "0.1.2"}, "bm25s 0.1.2, installed is"),
        ({"num_documents": "7"}, "needs an integer `num_documents`"),
        ({"num_documents": 8}, "7 passages, 7 scored, 8 in the manifest"),
        ({"files": []}, "an object `files`"),
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
    write_manifest(copy, INDEX_FILES, NUM_DOCUMENTS, source={})
    with pytest.raises(IndexCorrupted, match="do not fit together"):
        BM25Index.load(copy)


def test_a_directory_that_is_not_there_is_no_corruption(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"index_dir .*nowhere is not a directory; build the index first"):
        BM25Index.load(tmp_path / "nowhere")
