// Vercel's AI SDK transcribes a file. Arguments: URL, model, a sound file.
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { experimental_transcribe as transcribe } from "ai";

const [url, name, path] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const model = openai.transcription(name);
const providerOptions = { openai: { language: "en", temperature: 0, timestampGranularities: ["segment"] } };
const found = await transcribe({ model, audio: readFileSync(path), providerOptions, maxRetries: 0 });
console.log(JSON.stringify({ text: found.text, numSegments: found.segments.length, duration: found.durationInSeconds }));
