// node client.mjs URL QUESTION: the AI SDK's answers as one line of JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, prompt] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "quire", baseURL, supportsStructuredOutputs: true })("quire-demo");
const entry = z.object({ kind: z.enum(["file", "folder"]), count: z.number().int().min(0).max(99) });
const options = { model, prompt, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const calling = {
  ...options,
  tools: { note: tool({ description: "Write down how many there are.", inputSchema: entry }) },
  toolChoice: "required",
};

const { text } = await generateText(options);
let streamedText = "";
for await (const part of streamText(options).textStream) streamedText += part;
const { object } = await generateObject({ ...options, schema: entry });
let streamedObject;
for await (const part of streamObject({ ...options, schema: entry }).partialObjectStream) streamedObject = part;
const inputs = (calls) => calls.map((call) => entry.parse(call.input));
const calls = inputs((await generateText(calling)).toolCalls);
const stream = streamText(calling);
await stream.consumeStream();
const streamedCalls = inputs(await stream.toolCalls);
console.log(JSON.stringify({ text, streamedText, object, streamedObject, calls, streamedCalls }));
