// Ask for an object of a schema, and let a model call tools, by the AI SDK.
//
// Start a system with its gateway first: `specdec up --http 127.0.0.1:8000 --detach --target MODEL`, of a model that
// has learned to call tools. `OPENAI_BASE_URL` names another one. Needs `npm install ai @ai-sdk/openai-compatible zod`.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8000/v1";
const specdec = createOpenAICompatible({ name: "specdec", baseURL, supportsStructuredOutputs: true });
const options = {
  model: specdec("target"),
  prompt: "Will it rain in Paris?",
  temperature: 0,
  maxOutputTokens: 100,
  providerOptions: { specdec: { reasoningEffort: "none", parallel_tool_calls: false } },
};

const schema = z.object({ answer: z.enum(["yes", "no"]), isSure: z.boolean() });
const { object } = await generateObject({ ...options, schema });
console.log(object);

const city = z.enum(["Paris", "Rome"]);
const getWeather = tool({ inputSchema: z.object({ city }), execute: ({ city }) => `${city}: rain` });
const { steps } = await generateText({
  ...options,
  tools: { getWeather },
  toolChoice: "required",
  stopWhen: stepCountIs(2),
});
for (const step of steps) {
  for (const { toolName, input, output } of step.toolResults) console.log(toolName, input, "->", output);
}
