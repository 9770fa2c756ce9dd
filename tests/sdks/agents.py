"""Agents as the documentation of their SDKs writes them. Only the address and the key are the endpoint's.

Each answers the example's question, and if its SDK keeps conversations, a `follow_up`, with a tool `search`.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sorl_trl.endpoint import command_agent

Search = Callable[[str], str]

SYSTEM = "Answer with the help of search."
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH_TOOL = {
    "type": "function",
    "function": {"name": "search", "description": "Search the atlas.", "parameters": PARAMETERS},
}
TURNS = 4
NODE = Path(__file__).parents[2] / ".harnesses"
"""Where the packages of npm are."""


def questions(example: Mapping[str, Any]) -> list[str]:
    return [example["question"], *([example["follow_up"]] if example.get("follow_up") else [])]


def tool_of(look_up: Search) -> Search:
    """The tool as a function, from whose signature and docstring SDKs make a description."""

    def search(query: str) -> str:
        """Search the atlas."""
        return look_up(query)

    return search


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

    agent: Any = create_agent(model, [tool(tool_of(look_up))], system_prompt=SYSTEM)
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

    tools: list[Any] = [agents.function_tool(tool_of(look_up))]
    agent = agents.Agent(name="Searcher", instructions=SYSTEM, model=model, tools=tools)
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
    agent: Any = Agent(model, instructions=SYSTEM, tools=[tool_of(look_up)])
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


async def google_adk(example: Any, endpoint: Any, look_up: Search) -> str:
    from google.adk.agents import Agent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    model = LiteLlm(model="openai/policy", api_base=endpoint.base_url, api_key=endpoint.api_key)
    agent = Agent(name="searcher", model=model, instruction=SYSTEM, tools=[tool_of(look_up)])
    runner = InMemoryRunner(agent=agent, app_name="atlas")
    session = await runner.session_service.create_session(app_name="atlas", user_id="user")
    said = ""
    for question in questions(example):
        message = types.Content(role="user", parts=[types.Part(text=question)])
        async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message):
            if event.is_final_response() and event.content and event.content.parts:
                said = "".join(part.text or "" for part in event.content.parts)
    return said


async def strands(example: Any, endpoint: Any, look_up: Search) -> str:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    access = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
    model = OpenAIModel(client_args=access, model_id="policy")
    agent = Agent(model, tools=[tool(tool_of(look_up))], system_prompt=SYSTEM, callback_handler=None)
    for question in questions(example):
        result = await agent.invoke_async(question)
    return str(result)


async def autogen(example: Any, endpoint: Any, look_up: Search) -> str:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    can = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}
    info: Any = {**can, "family": "unknown"}
    access = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
    client = OpenAIChatCompletionClient(model="policy", model_info=info, **access)
    tools: list[Any] = [tool_of(look_up)]
    agent = AssistantAgent("searcher", client, tools=tools, system_message=SYSTEM, max_tool_iterations=TURNS)
    for question in questions(example):
        result = await agent.run(task=question)
    return str(result.messages[-1].content)


async def agno(example: Any, endpoint: Any, look_up: Search) -> str:
    from agno.agent import Agent
    from agno.db.in_memory import InMemoryDb
    from agno.models.openai.like import OpenAILike
    from agno.run.base import RunStatus

    model = OpenAILike(id="policy", base_url=endpoint.base_url, api_key=endpoint.api_key)
    tools: list[Any] = [tool_of(look_up)]
    agent = Agent(model=model, tools=tools, instructions=SYSTEM, db=InMemoryDb(), add_history_to_context=True)
    for question in questions(example):
        result = await agent.arun(question, session_id="atlas")
        if result.status == RunStatus.error:  # whose text would be the answer
            raise RuntimeError(result.content)
    return str(result.content)


async def llama_index(example: Any, endpoint: Any, look_up: Search) -> str:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.memory import Memory
    from llama_index.llms.openai_like import OpenAILike

    access = {"api_base": endpoint.base_url, "api_key": endpoint.api_key}
    llm = OpenAILike("policy", is_chat_model=True, is_function_calling_model=True, **access)
    agent = FunctionAgent(tools=[tool_of(look_up)], llm=llm, system_prompt=SYSTEM)
    memory = Memory.from_defaults(session_id="atlas")
    for question in questions(example):
        response = await agent.run(question, memory=memory)
    return str(response)


async def dspy(example: Any, endpoint: Any, look_up: Search) -> str:
    """Asks one question, because `ReAct` keeps no conversation. A cached answer would be no call."""
    import dspy as sdk
    from dspy.utils.exceptions import AdapterParseError

    lm = sdk.LM("openai/policy", api_base=endpoint.base_url, api_key=endpoint.api_key, cache=False)
    react = sdk.ReAct("question -> answer", tools=[tool_of(look_up)], max_iters=TURNS)
    with sdk.context(lm=lm):
        try:
            return str((await react.acall(question=example["question"])).answer)
        except AdapterParseError as error:  # until the policy has learned dspy's format
            return str(error.lm_response)


async def in_node(example: Any, endpoint: Any, look_up: Search, name: str) -> str:
    """An agent of `agents.mjs`, whose tool finds one passage. Node looks for packages beside the script."""
    script = shutil.copy(Path(__file__).with_name("agents.mjs"), NODE)
    agent = command_agent(f"node {script} {name}")
    return str(await agent({**example, "found": look_up("Oslo")}, endpoint))


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
    "google-adk": google_adk,
    "strands": strands,
    "autogen": autogen,
    "agno": agno,
    "llama-index": llama_index,
    "dspy": dspy,
    "ai-sdk, chat": partial(in_node, name="aiSdkChat"),
    "ai-sdk, responses": partial(in_node, name="aiSdkResponses"),
    "openai-agents in node, responses": partial(in_node, name="openaiAgentsResponses"),
    "openai-agents in node, chat": partial(in_node, name="openaiAgentsChat"),
}
SENDS_CALLS = [name for name in AGENTS if not name.startswith(("smolagents", "dspy"))]
"""Those that send calls back as they got them."""
IN_NODE = [name for name, agent in AGENTS.items() if getattr(agent, "func", None) is in_node]
"""Those that take half a second to start."""


def with_reward(agent: Any, look_up: Search, reward: Callable[[str], float]) -> Any:
    """An agent that is rewarded for what it answers, as a coroutine function or a function, which it was."""
    if inspect.iscoroutinefunction(agent):

        async def rewarded(example: Any, endpoint: Any) -> float:
            return reward(await agent(example, endpoint, look_up))
    else:

        def rewarded(example: Any, endpoint: Any) -> float:
            return reward(agent(example, endpoint, look_up))

    return rewarded
