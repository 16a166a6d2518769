// The official client for Node: models, completions, chat whole and assembled from a stream, embeddings, a mistake.
// Arguments: URL, model.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const request = { model, messages: [{ role: "user", content: "Tell me about a fox." }], temperature: 0, max_tokens: 12 };

const models = [];
for await (const entry of client.models.list()) models.push(entry.id);

const whole = await client.chat.completions.create(request);
const runner = client.chat.completions.stream({ ...request, stream_options: { include_usage: true } });
let pieces = "";
runner.on("content", (delta) => (pieces += delta));
const streamed = await runner.finalChatCompletion();

const text = await client.completions.create({ model, prompt: "Once upon a time", temperature: 0, max_tokens: 6, logprobs: 1 });
const chunks = [];
for await (const chunk of await client.completions.create({ model, prompt: "Once upon a time", temperature: 0, max_tokens: 6, stream: true })) {
  chunks.push(chunk.choices[0].text);
}
const vectors = await client.embeddings.create({ model, input: ["a fox", "a crow"] });
const response = await client.responses.create({ model, input: "Tell me about a fox.", temperature: 0, max_output_tokens: 16 });

let mistake = null;
try {
  await client.chat.completions.create({ ...request, n: 1000 });
} catch (error) {
  mistake = { status: error.status, param: error.param, code: error.code, isBadRequest: error instanceof OpenAI.BadRequestError };
}
console.log(JSON.stringify({
  models, pieces, mistake,
  whole: whole.choices[0].message.content,
  wholeUsage: whole.usage.total_tokens,
  streamed: streamed.choices[0].message.content,
  streamedUsage: streamed.usage.total_tokens,
  finishReason: streamed.choices[0].finish_reason,
  text: text.choices[0].text,
  textTokens: text.choices[0].logprobs.tokens,
  textChunks: chunks,
  numVectors: vectors.data.length,
  numDimensions: vectors.data[0].embedding.length,
  response: response.output_text,
}));
