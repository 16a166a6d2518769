// The official client for Node: a transcript whole, with segments, as subtitles, streamed; a translation; a mistake.
// Arguments: URL, model, a sound file.
import { createReadStream } from "node:fs";
import OpenAI from "openai";

const [url, model, path] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const asked = (fields) => ({ model, file: createReadStream(path), language: "en", temperature: 0, ...fields });

const whole = await client.audio.transcriptions.create(asked({}));
const verbose = await client.audio.transcriptions.create(asked({ response_format: "verbose_json" }));
const subtitles = await client.audio.transcriptions.create(asked({ response_format: "srt" }));
const pieces = [];
let done = null;
for await (const event of await client.audio.transcriptions.create(asked({ stream: true }))) {
  if (event.type === "transcript.text.delta") pieces.push(event.delta);
  if (event.type === "transcript.text.done") done = event;
}
const { language, ...rest } = asked({});
const english = await client.audio.translations.create(rest);
let mistake = null;
try {
  await client.audio.transcriptions.create(asked({ response_format: "diarized_json" }));
} catch (error) {
  mistake = { status: error.status, param: error.param, code: error.code };
}
console.log(JSON.stringify({
  text: whole.text, pieces: pieces.join(""), done: done.text, tokens: done.usage.total_tokens,
  segments: verbose.segments.map((one) => one.text).join(""), duration: verbose.duration,
  numSubtitles: subtitles.split("-->").length - 1, numSegments: verbose.segments.length, english: english.text, mistake,
}));
