from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from sorl_trl.evaluation import encode_prompts

WORDS = ["[PAD]", "who", "ann", "user", ":"]


def test_prompts_are_encoded_as_text_or_by_the_chat_template() -> None:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[PAD]")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} : {{ m.content }}{% endfor %}"
    rows = [{"prompt": "who ann"}, {"prompt": [{"role": "user", "content": "who"}]}]
    assert encode_prompts(tokenizer, rows) == [
        [WORDS.index("who"), WORDS.index("ann")],
        [WORDS.index("user"), WORDS.index(":"), WORDS.index("who")],
    ]
