// node client.mjs URL QUESTION: the AI SDK's answers as one line of JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
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
const agent = {
  ...options,
  prompt: "What's the weather in Paris?",
  tools: {
    get_weather: tool({
      description: "The weather in a city.",
      inputSchema: z.object({ city: z.literal("Paris") }),
      execute: async () => "rainy, 9 degrees",
    }),
  },
  stopWhen: stepCountIs(3),
};
const { text: weather } = await generateText(agent);
const weatherStream = streamText(agent);
await weatherStream.consumeStream();
const streamedWeather = await weatherStream.text;
console.log(JSON.stringify({ weather, streamedWeather, text, streamedText, object, streamedObject, calls, streamedCalls }));
