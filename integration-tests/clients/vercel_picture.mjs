// Vercel's AI SDK about a picture, by chats and by responses. Arguments: URL, model, a file with the picture, the question.
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const [url, name, file, text] = process.argv.slice(2);
const image = { type: "image", image: readFileSync(file), mediaType: "image/png" };
const chats = createOpenAICompatible({ name: "llmstack", baseURL: url, apiKey: "none" });
const responses = createOpenAI({ baseURL: url, apiKey: "none" });
const said = [];
for (const model of [chats(name), responses.responses(name)]) {
  const messages = [{ role: "user", content: [image, { type: "text", text }] }];
  const answer = await generateText({ model, messages, temperature: 0, maxOutputTokens: 16, maxRetries: 0 });
  said.push(answer.text);
}
console.log(JSON.stringify(said));
