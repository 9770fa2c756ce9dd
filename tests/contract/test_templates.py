"""How TRL's chat templates show a turn of the policy again: the table of docs/reference/models.md."""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress
from importlib.resources import files
from typing import Any

import trl.chat_template_utils as templates
from jinja2 import TemplateError

from sorl_trl.endpoint.conversation import EXTENDED, NEW_CONTEXT, Conversation
from sorl_trl.endpoint.messages import ChatFormat, Message, Request
from sorl_trl.rollout.chat import RolloutSetup, check_results, reads_calls
from sorl_trl.rollout.tools import ChatProtocol
from tests.endpoint import say, setup_of
from tests.tools import qwen_tokenizer

TEMPLATES = {
    path.name.removesuffix(".jinja"): path.read_text()
    for path in files("trl").joinpath("chat_templates").iterdir()
    if path.name.endswith(".jinja")
}
NONE = "not shown"
SEARCH: Message = {
    "name": "search",
    "description": "Finds passages.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string", "description": "What to find."}}},
}
TOOLS = [{"type": "function", "function": SEARCH}]
QUESTION = {"role": "user", "content": "Where is Oslo?"}
CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "Oslo"}}}
SAYS: dict[str, Message] = {
    "answer": {"role": "assistant", "content": "In Norway."},
    "call": {"role": "assistant", "content": "", "tool_calls": [CALL]},
}
THOUGHTS = "I should look."
AGAIN, FOUND = {"role": "user", "content": "And Bergen?"}, {"role": "tool", "name": "search", "content": "In Norway."}
GLM = {"answer": "<|user|>", "call": "<|observation|>"}
"""The tokens with which a GLM ends its turns, which its template shows as the beginning of what follows."""

EXPECTED = {
    (EXTENDED, EXTENDED): "gemma4 gemma4_v2 gemma4_v3 gemma4_v4 lfm2_v2 lfm2_v2_training llama3_1 llama3_2 qwen2_5 "
    "qwen2_5_training qwen3_8 qwen3_8_training qwen3_instruct_2507 qwen3_instruct_2507_training qwen3_vl "
    "qwen3_vl_training qwen3_training qwen3_5_nothink_training qwen3_5_think_training qwen3_6_training",
    (NEW_CONTEXT, EXTENDED): "gemma4_v5 glm4moe glm4moe_training gptoss gptoss_training lfm2_2_5 lfm2_2_5_v2 "
    "lfm2_2_5_vl nemotron_3_5_lightning "
    "nemotron_3_5_lightning_training nemotron_3_nano nemotron_3_nano_training nemotron_3_super "
    "nemotron_3_super_training nemotron_3_ultra nemotron_3_ultra_training qwen3 qwen3_5_nothink qwen3_5_think qwen3_6",
    (
        EXTENDED,
        NONE,
    ): "cohere cohere_training cohere2 cohere2_training gemma gemma_training gemma3 gemma3_training lfm2 "
    "lfm2_training llama3 llama3_training phi3 phi3_training phi3_5 phi3_5_training qwen2_5_vl qwen2_5_vl_training",
    (NEW_CONTEXT, NONE): "deepseek_r1_distill deepseek_r1_distill_training deepseekv3 deepseekv3_training "
    "diffusion_gemma diffusion_gemma_training muse_glimmer muse_glimmer_training",
    (NONE, NONE): "idefics3 idefics3_training llava_next llava_next_training smolvlm smolvlm_training",
}
OTHER_RESULTS = (
    "gemma4 gemma4_v3 gemma4_v4 gemma4_v5 glm4moe glm4moe_training gptoss gptoss_training llama3_1 llama3_2"
)
"""Those that show results of tools as a `ToolBox` cannot."""


def tokenizer_of(name: str) -> Any:
    """A byte-level tokenizer with a template, and with the parser of calls of its family."""
    tokenizer: Any = qwen_tokenizer()
    tokenizer.bos_token = "<bos>"
    tokenizer.chat_template = TEMPLATES[name.removesuffix("_training")]
    with suppress(ValueError):
        templates.add_response_schema(tokenizer)
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def written(name: str, tokenizer: Any, kind: str, **options: Any) -> str | None:
    """The policy's turn as its template shows the last one, with thoughts if it shows any; else None."""
    options |= {"tools": TOOLS if kind == "call" else None, "tokenize": False}
    try:
        prompt = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, **options)
        plain, thinking = (
            tokenizer.apply_chat_template([QUESTION, SAYS[kind] | more], **options)
            for more in ({}, {"reasoning_content": THOUGHTS})
        )
    except (TemplateError, TypeError):
        return None
    begun = [each.removeprefix(prompt) for each in (thinking, plain) if each.startswith(prompt)]
    if begun:
        turn = begun[0] if THOUGHTS in begun[0] else begun[-1]
    else:  # an open thought in the prompt, which the template drops at once
        turn = f"{THOUGHTS}\n</think>\n\n" + plain.removeprefix(prompt.removesuffix("<think>\n"))
    if name.startswith("glm"):
        turn = turn.removesuffix(GLM[kind]) + GLM[kind]
    said = "In Norway." if kind == "answer" else "Oslo"
    ends = re.findall(r"<[^<>\s]+>", turn.partition(said)[2])
    if not ends:
        return None
    end = ends[0 if kind == "answer" else -1]
    tokenizer.add_special_tokens({"eos_token": end})
    return turn[: turn.rindex(end) + len(end)]


def again(name: str, kind: str, **options: Any) -> str:
    """How a request continues the one before, after an answer or a call."""
    tokenizer = tokenizer_of(name)
    turn = written(name, tokenizer, kind, **options)
    if turn is None or (kind == "call" and not reads_calls(tokenizer)):
        return NONE
    setup = setup_of(tokenizer)
    chat = ChatFormat.of(RolloutSetup(tokenizer, None, options, setup.eos_token_ids, setup.limits))
    conversation, tools = Conversation(chat), TOOLS if kind == "call" else []
    said = say(conversation, conversation.begin(Request("policy", [QUESTION], tools)), turn).message
    ids = [call["id"] for call in said.get("tool_calls", ())]
    new = [AGAIN] if kind == "answer" else [{**FOUND, "tool_call_id": each} for each in ids]
    call = conversation.begin(Request("policy", [QUESTION, said, *new], tools))
    return call.kind if new and new[0]["content"] in "".join(each.text for each in call.observations) else NONE


def test_how_each_template_shows_an_earlier_turn() -> None:
    found = defaultdict(set)
    for name in TEMPLATES:
        found[again(name, "answer"), again(name, "call")].add(name)
    assert found == {kinds: {*names.split()} for kinds, names in EXPECTED.items()}
    assert sum(map(len, found.values())) == 72


def test_without_thoughts_qwen3_continues_only_with_its_training_template() -> None:
    kinds = {name: again(name, "call", enable_thinking=False) for name in ("qwen3", "qwen3_training", "qwen3_5_think")}
    assert kinds == {"qwen3": NEW_CONTEXT, "qwen3_training": EXTENDED, "qwen3_5_think": EXTENDED}


def test_which_results_a_tool_box_cannot_show() -> None:
    others = set()
    for name in TEMPLATES:
        tokenizer = tokenizer_of(name)
        if written(name, tokenizer, "call") and reads_calls(tokenizer):
            preserves = templates.is_chat_template_prefix_preserving(tokenizer)
            tokenizer.chat_template = tokenizer.chat_template if preserves else TEMPLATES[f"{name}_training"]
            with suppress(ValueError):
                check_results(setup_of(tokenizer), ChatProtocol().in_chat(tokenizer, {}))
                continue
            others.add(name)
    assert others == {*OTHER_RESULTS.split()}
