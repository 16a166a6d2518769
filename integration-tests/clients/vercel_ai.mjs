// Vercel's AI SDK: text, a stream, an object of a schema and a tool call, by chats and by responses. Arguments: URL, model.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const chats = createOpenAICompatible({ name: "llmstack", baseURL: url, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const responses = createOpenAI({ baseURL: url, apiKey: "none" });
const said = {};
for (const [kind, model] of [["chats", chats(name)], ["responses", responses.responses(name)]]) {
  const request = { model, prompt: "Tell me about a fox.", temperature: 0, maxOutputTokens: 16, maxRetries: 0 };
  const whole = await generateText(request);
  const stream = streamText(request);
  let streamed = "";
  for await (const piece of stream.textStream) streamed += piece;
  const { object } = await generateObject({ ...request, maxOutputTokens: 100, schema: z.object({ small: z.boolean() }) });
  const look = tool({ inputSchema: z.object({ deep: z.boolean() }) });
  const called = await generateText({ ...request, maxOutputTokens: 100, tools: { look }, toolChoice: "required" });
  said[kind] = {
    whole: whole.text, streamed, object, usage: [whole.usage.outputTokens, (await stream.usage).outputTokens],
    finishReason: whole.finishReason, calls: called.toolCalls.map((call) => [call.toolName, typeof call.input.deep]),
  };
}
console.log(JSON.stringify(said));
