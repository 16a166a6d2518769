// llama.cpp as the npm package `node-llama-cpp` has it compiled, for comparisons: it takes the variant of this processor.
//
// Reads names of loads, one a line, and writes processor milliseconds per token for each. `four_bits.py` starts it.
import readline from "node:readline";

import { getLlama, LlamaLogLevel } from "node-llama-cpp";

const NUM_ROWS = 8, NUM_OUTPUTS = 32, PROMPT = 16, LONG_PROMPT = 512;

const llama = await getLlama({ gpu: false, build: "never", maxThreads: 1, logLevel: LlamaLogLevel.error });
const started = process.cpuUsage();
const model = await llama.loadModel({ modelPath: process.argv[2] });
const context = await model.createContext({ contextSize: 1024, sequences: NUM_ROWS, threads: 1, batchSize: LONG_PROMPT });
const rows = Array.from({ length: NUM_ROWS }, () => context.getSequence());

const milliseconds = (since) => {
  const used = process.cpuUsage(since);
  return (used.user + used.system) / 1e3;
};
const randomTokens = (count) => Array.from({ length: count }, () => 300 + Math.floor(Math.random() * 30000));

async function restart(row) {
  await row.clearHistory();
  await row.evaluateWithoutGeneratingNewTokens(randomTokens(PROMPT));
}

async function generate(row) {
  let left = NUM_OUTPUTS;
  for await (const _ of row.evaluate(randomTokens(1), { temperature: 0, yieldEogToken: true })) if (--left === 0) break;
}

async function decode(count) {
  const own = rows.slice(0, count);
  for (const row of own) await restart(row);
  const before = process.cpuUsage();
  await Promise.all(own.map(generate));
  return milliseconds(before) / (count * NUM_OUTPUTS);
}

async function readPrompt() {
  await rows[0].clearHistory();
  const before = process.cpuUsage();
  await rows[0].evaluateWithoutGeneratingNewTokens(randomTokens(LONG_PROMPT));
  return milliseconds(before) / LONG_PROMPT;
}

const LOADS = { "one stream": () => decode(1), "8 at once": () => decode(NUM_ROWS), "prompt of 512": readPrompt };

console.log(`${(milliseconds(started) / 1e3).toFixed(2)} s to load; ${llama.systemInfo}`);
for await (const line of readline.createInterface({ input: process.stdin })) console.log((await LOADS[line]()).toFixed(3));
process.exit(0);
