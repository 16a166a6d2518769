// Ollama's client for Node: chat, prompt, streams, a call, format, vectors, models and a mistake. Arguments: URL, model.
import { Ollama } from "ollama";

const [url, model] = process.argv.slice(2);
const client = new Ollama({ host: url.replace(/\/v1$/, "") });
const messages = [{ role: "user", content: "Tell me about a fox." }];
const options = { temperature: 0, num_predict: 10 };

const whole = await client.chat({ model, messages, options });
const parts = [];
for await (const part of await client.chat({ model, messages, options, stream: true })) parts.push(part);
const prompt = await client.generate({ model, prompt: "Tell me about a fox.", options });
let raw = "";
for await (const part of await client.generate({ model, prompt: "Once upon a time", raw: true, options, stream: true })) {
  raw += part.response;
}
const schema = { type: "object", properties: { a: { type: "boolean" } }, required: ["a"], additionalProperties: false };
const formatted = await client.chat({ model, messages, format: schema, options: { num_predict: 400, seed: 1 } });
const vectors = await client.embed({ model, input: ["a fox", "a crow"] });

let left = 0;
const stream = await client.chat({ model, messages, options: { num_predict: 400 }, stream: true });
try {
  for await (const part of stream) {
    left += part.message.content.length;
    stream.abort();
  }
} catch (error) {
  left = error.name === "AbortError" ? left : -1;
}
let mistake = "";
try {
  await client.chat({ model: "nobody", messages });
} catch (error) {
  mistake = `${error.status_code} ${error.error ?? error.message}`;
}
console.log(JSON.stringify({
  models: (await client.list()).models.map((one) => one.model),
  running: (await client.ps()).models.map((one) => one.model),
  capabilities: (await client.show({ model })).capabilities,
  version: (await client.version()).version,
  whole: whole.message.content,
  wholeCount: whole.eval_count,
  streamed: parts.map((part) => part.message.content).join(""),
  numParts: parts.length,
  streamedCount: parts.at(-1).eval_count,
  prompt: prompt.response,
  raw,
  formatted: JSON.parse(formatted.message.content),
  numVectors: vectors.embeddings.length,
  left,
  mistake,
}));
