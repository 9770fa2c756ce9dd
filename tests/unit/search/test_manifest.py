from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from sorl_trl.search.engines.manifest import Manifest, fingerprint, library_of


def test_what_the_manifest_records(corpus_path, index_dir):
    manifest = json.loads((index_dir / "manifest.json").read_text())
    assert (manifest["engine"], manifest["library"], manifest["num_documents"]) == ("bm25", "bm25s 0.3", 7)
    assert manifest["sources"] == [fingerprint(corpus_path)]


def test_a_fingerprint_worked_by_hand(tmp_path):
    (tmp_path / "file").write_bytes(b"abc" * 1_000_000)
    expected = hashlib.sha256(b"abc" * 1_000_000).hexdigest()
    assert fingerprint(tmp_path / "file") == {"sha256": expected, "bytes": 3_000_000}


def test_identity_follows_the_content_alone():
    manifest = Manifest("e", "l 1", 1, [{"sha256": "a", "bytes": 1}], {"model": "m"})
    assert manifest.identity.startswith("e-")
    assert len(manifest.identity) == 18
    others = [
        replace(manifest, sources=[{"sha256": "b", "bytes": 1}]),
        replace(manifest, settings={"model": "n"}),
        replace(manifest, library="l 2"),
        replace(manifest, engine="f"),
    ]
    assert len({other.identity for other in (*others, manifest)}) == 5


def test_a_library_is_named_with_its_minor_version(monkeypatch):
    assert library_of("bm25") == "bm25s 0.3"
    assert library_of("dense") == "numpy npy"
    monkeypatch.setattr("sorl_trl.search.engines.manifest.LIBRARIES", {"bm25": "no-such-distribution"})
    with pytest.raises(ImportError):
        library_of("bm25")
