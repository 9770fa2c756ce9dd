// Agents as the documentation of their JavaScript SDKs writes them: `node agents.mjs NAME`.
//
// The example comes on standard input, with what `search` finds; the address and the key come from the environment, and
// the last line is the answer as JSON.

import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as agents from "@openai/agents";
import { isStepCount, tool, ToolLoopAgent } from "ai";
import { z } from "zod";

const SYSTEM = "Answer with the help of search.";
const TURNS = 4;
const description = "Search the atlas.";
const query = z.object({ query: z.string() });
const access = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };

const { question, follow_up, found } = JSON.parse(readFileSync(0, "utf8"));
const questions = [question, follow_up].filter(Boolean);

async function aiSdk(model) {
  const search = tool({ description, inputSchema: query, execute: async () => found });
  const agent = new ToolLoopAgent({ model, instructions: SYSTEM, tools: { search }, stopWhen: isStepCount(TURNS) });
  const messages = [];
  let result;
  for (const content of questions) {
    messages.push({ role: "user", content });
    result = await agent.generate({ messages });
    messages.push(...result.responseMessages);
  }
  return result.text;
}

async function openaiAgents(api) {
  agents.setOpenAIAPI(api);
  const search = agents.tool({ name: "search", description, parameters: query, execute: async () => found });
  const agent = new agents.Agent({ name: "Searcher", model: "policy", instructions: SYSTEM, tools: [search] });
  let history = [];
  let result;
  for (const content of questions) {
    result = await agents.run(agent, [...history, { role: "user", content }], { maxTurns: TURNS });
    history = result.history;
  }
  return result.finalOutput;
}

const AGENTS = {
  aiSdkChat: () => aiSdk(createOpenAICompatible({ name: "policy", ...access })("policy")),
  aiSdkResponses: () => aiSdk(createOpenAI(access)("policy")),
  openaiAgentsResponses: () => openaiAgents("responses"),
  openaiAgentsChat: () => openaiAgents("chat_completions"),
};
console.log(JSON.stringify(await AGENTS[process.argv[2]]()));
