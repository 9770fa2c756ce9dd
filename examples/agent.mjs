// An agent in JavaScript, without an SDK: it guesses a number from 1 to 9, and is told whether that is too low.
//
// Each trajectory runs it in a process of its own, with
// `rollout_func=EndpointRollout(command_agent("node examples/agent.mjs"))`: the row of the dataset comes on standard
// input, the address and the key from the environment, and the last line is the reward.

import { readFileSync } from "node:fs";

const { number } = JSON.parse(readFileSync(0, "utf8"));
const messages = [{ role: "user", content: "Guess a number from 1 to 9. Write the number alone." }];

async function guess() {
  const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { Authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json" },
    body: JSON.stringify({ model: "policy", messages }),
  });
  if (!response.ok) throw new Error(await response.text());
  const { message } = (await response.json()).choices[0];
  messages.push(message);
  return Number(message.content);
}

let reward = 0;
for (let left = 4; left > 0 && reward === 0; left--) {
  const guessed = await guess();
  if (guessed === number) reward = 1;
  else messages.push({ role: "user", content: guessed < number ? "Higher." : "Lower." });
}
console.log(reward);
