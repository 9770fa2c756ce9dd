"""Thirteen agents as the documentation of their SDKs writes them. Only the address and the key are the endpoint's.

Each answers the example's question, and if its SDK keeps conversations, a `follow_up`, with a tool `search`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Search = Callable[[str], str]

SYSTEM = "Answer with the help of search."
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH_TOOL = {
    "type": "function",
    "function": {"name": "search", "description": "Search the atlas.", "parameters": PARAMETERS},
}
TURNS = 4


def questions(example: Mapping[str, Any]) -> list[str]:
    return [example["question"], *([example["follow_up"]] if example.get("follow_up") else [])]


# ---------------------------------------------------------------------------------------------------------------------
# OpenAI
# ---------------------------------------------------------------------------------------------------------------------


async def openai_chat(example: Any, endpoint: Any, look_up: Search, ask: Any = None) -> str:
    """The loop of OpenAI's guide to function calling."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    said = ""
    for question in questions(example):
        messages.append({"role": "user", "content": question})
        for _ in range(TURNS):
            message = await (ask or openai_whole)(client, messages)
            messages.append(message)
            said = message.get("content") or ""
            if not message.get("tool_calls"):
                break
            messages += [tool_message(call, look_up) for call in message["tool_calls"]]
    return said


def tool_message(call: Mapping[str, Any], look_up: Search) -> dict[str, Any]:
    query = json.loads(call["function"]["arguments"])["query"]
    return {"role": "tool", "tool_call_id": call["id"], "content": look_up(query)}


async def openai_whole(client: Any, messages: Any) -> dict[str, Any]:
    reply = await client.chat.completions.create(model="policy", messages=messages, tools=[SEARCH_TOOL])
    message: dict[str, Any] = reply.choices[0].message.model_dump(exclude_none=True)
    return message


async def openai_bare(client: Any, messages: Any) -> dict[str, Any]:
    """Copies what many tutorials copy: content, and calls without anything else."""
    message = await openai_whole(client, messages)
    return {name: message.get(name) for name in ("role", "content", "tool_calls") if message.get(name)}


async def openai_streamed(client: Any, messages: Any) -> dict[str, Any]:
    content, calls = "", dict[int, dict[str, Any]]()
    stream = await client.chat.completions.create(
        model="policy", messages=messages, tools=[SEARCH_TOOL], stream=True, stream_options={"include_usage": True}
    )
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                function = {"name": part.function.name, "arguments": ""}
                call = calls.setdefault(part.index, {"id": part.id, "type": "function", "function": function})
                call["function"]["arguments"] += part.function.arguments or ""
    assert usage.completion_tokens > 0
    return {"role": "assistant", "content": content or None, **({"tool_calls": [*calls.values()]} if calls else {})}


async def litellm_chat(example: Any, endpoint: Any, look_up: Search) -> str:
    import litellm

    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    said = ""
    for question in questions(example):
        messages.append({"role": "user", "content": question})
        for _ in range(TURNS):
            reply = await litellm.acompletion(
                "openai/policy",
                messages,
                tools=[SEARCH_TOOL],
                api_base=endpoint.base_url,
                api_key=endpoint.api_key,
            )
            message = reply.choices[0].message
            messages.append(message)
            said = message.content or ""
            if not message.tool_calls:
                break
            messages += [tool_message(call.model_dump(), look_up) for call in message.tool_calls]
    return said


# ---------------------------------------------------------------------------------------------------------------------
# Frameworks
# ---------------------------------------------------------------------------------------------------------------------


async def langgraph(example: Any, endpoint: Any, look_up: Search) -> str:
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="policy", base_url=endpoint.base_url, api_key=endpoint.api_key)

    @tool
    def search(query: str) -> str:
        """Search the atlas."""
        return look_up(query)

    agent: Any = create_agent(model, [search], system_prompt=SYSTEM)
    messages: list[Any] = []
    for question in questions(example):
        state = await agent.ainvoke({"messages": [*messages, ("user", question)]}, {"recursion_limit": 4 * TURNS})
        messages = state["messages"]
    return str(messages[-1].text)


async def openai_agents(
    example: Any, endpoint: Any, look_up: Search, api: str = "Responses", stream: bool = False
) -> str:
    import agents
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    model = getattr(agents, f"OpenAI{api}Model")(model="policy", openai_client=client)

    @agents.function_tool
    def search(query: str) -> str:
        """Search the atlas."""
        return look_up(query)

    agent = agents.Agent(name="Searcher", instructions=SYSTEM, model=model, tools=[search])
    items: list[Any] = []
    for question in questions(example):
        items.append({"role": "user", "content": question})
        if stream:
            result = agents.Runner.run_streamed(agent, items, max_turns=TURNS)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, items, max_turns=TURNS)
        items = result.to_input_list()
    return str(result.final_output)


async def pydantic_ai(example: Any, endpoint: Any, look_up: Search, api: str = "Chat") -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key)
    model = getattr(openai, f"OpenAI{api}Model")("policy", provider=provider)
    agent: Any = Agent(model, instructions=SYSTEM)

    @agent.tool_plain
    def search(query: str) -> str:
        """Search the atlas."""
        return look_up(query)

    history: list[Any] = []
    for question in questions(example):
        result = await agent.run(question, message_history=history)
        history = result.all_messages()
    return str(result.output)


def smolagents(example: Any, endpoint: Any, look_up: Search, kind: str = "CodeAgent") -> str:
    import smolagents as sdk

    @sdk.tool
    def search(query: str) -> str:
        """
        Search the atlas.

        Args:
            query: What to look for.
        """
        return look_up(query)

    model = sdk.OpenAIModel("policy", api_base=endpoint.base_url, api_key=endpoint.api_key)
    agent = getattr(sdk, kind)([search], model, max_steps=TURNS, verbosity_level=0)
    for number, question in enumerate(questions(example)):
        said = agent.run(question, reset=number == 0)
    return str(said)


AGENTS: Mapping[str, Any] = {
    "openai": openai_chat,
    "openai, bare messages": partial(openai_chat, ask=openai_bare),
    "openai, streamed": partial(openai_chat, ask=openai_streamed),
    "litellm": litellm_chat,
    "langgraph": langgraph,
    "openai-agents, responses": openai_agents,
    "openai-agents, responses, streamed": partial(openai_agents, stream=True),
    "openai-agents, chat": partial(openai_agents, api="ChatCompletions"),
    "openai-agents, chat, streamed": partial(openai_agents, api="ChatCompletions", stream=True),
    "pydantic-ai, chat": pydantic_ai,
    "pydantic-ai, responses": partial(pydantic_ai, api="Responses"),
    "smolagents, CodeAgent": smolagents,
    "smolagents, ToolCallingAgent": partial(smolagents, kind="ToolCallingAgent"),
}
SENDS_CALLS = [name for name in AGENTS if not name.startswith("smolagents")]
"""Those that send calls back as they got them."""


def with_reward(agent: Any, look_up: Search, reward: Callable[[str], float]) -> Any:
    """An agent that is rewarded for what it answers, as a coroutine function or a function, which it was."""
    if inspect.iscoroutinefunction(agent):

        async def rewarded(example: Any, endpoint: Any) -> float:
            return reward(await agent(example, endpoint, look_up))
    else:

        def rewarded(example: Any, endpoint: Any) -> float:
            return reward(agent(example, endpoint, look_up))

    return rewarded
