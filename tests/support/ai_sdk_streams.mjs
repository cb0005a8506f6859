// Prints what the AI SDK makes of the streams and refusals of a gateway, as one line of JSON.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.OPENAI_BASE_URL;
const specdec = createOpenAICompatible({ name: "specdec", baseURL, supportsStructuredOutputs: true, includeUsage: true });
const base = { model: specdec("target"), prompt: "import os", temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const body = { reasoningEffort: "none", parallel_tool_calls: false };
const options = { ...base, providerOptions: { specdec: body } };
const schema = z.object({ answer: z.enum(["yes", "no"]), isSure: z.boolean() });

const whole = await generateObject({ ...options, schema });
const streamed = streamObject({ ...options, schema });
let numPartial = 0;
for await (const _ of streamed.partialObjectStream) numPartial += 1;

const done = [];
const ticket = tool({ inputSchema: schema, execute: (input) => (done.push(input), "filed") });
const loop = streamText({ ...options, tools: { ticket }, toolChoice: "required", stopWhen: stepCountIs(2) });
let deltas = "";
for await (const part of loop.fullStream) if (part.type === "tool-input-delta") deltas += part.delta;
const steps = await loop.steps;

const begun = { specdec: { chat_template_kwargs: { begun: true }, ignore_eos: true } };
const thought = await generateText({ ...base, maxOutputTokens: 8, providerOptions: begun });

const refused = await generateText({ ...options, temperature: -1 }).catch((error) => error);

console.log(JSON.stringify({
  whole: whole.object,
  wholeUsage: whole.usage,
  streamed: await streamed.object,
  numPartial,
  done,
  deltas,
  steps: steps.map(({ finishReason, toolResults }) => [finishReason, toolResults.map(({ output }) => output)]),
  reasoning: thought.reasoningText,
  reasoningTokens: thought.usage.outputTokenDetails.reasoningTokens,
  refused: [refused.statusCode, refused.message],
}));
