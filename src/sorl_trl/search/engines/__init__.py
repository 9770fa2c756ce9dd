"""Search engines over a corpus: BM25, tantivy and dense retrieval, and the folders that keep their indexes."""
