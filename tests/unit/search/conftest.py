from __future__ import annotations

import pytest
from tests.unit.search.backends import PASSAGES

from sorl_trl.search import BM25Index, write_corpus


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(PASSAGES, path)
    return path


@pytest.fixture(scope="session")
def index_dir(corpus_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("indexes") / "index"
    BM25Index.build(corpus_path, directory, show_progress=False)
    return directory


@pytest.fixture(scope="session")
def index(index_dir):
    return BM25Index.load(index_dir)


@pytest.fixture(scope="session")
def embedder(tmp_path_factory):
    """The folder of an embedding model: a randomly initialized BERT of width 16 that knows the words of `PASSAGES`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    split = pre_tokenizers.BertPreTokenizer()
    texts = ["query: passage:", *(f"{passage.title} {passage.text}" for passage in PASSAGES)]
    words = sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)})
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = split
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("models") / "embedder"
    BertModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    ).save_pretrained(folder)
    return folder
