// Server-sent events, and what they add to an answer. Nothing here knows the page.

// Events of a text that comes in pieces: `{id, data}`, where `id` is that of the last event that had one.
class EventParser {
  constructor() {
    this.rest = "";
    this.id = "";
    this.data = [];
  }

  add(text) {
    const events = [];
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    for (const whole of lines) {
      const line = whole.endsWith("\r") ? whole.slice(0, -1) : whole;
      if (line.startsWith("data:")) this.data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (line.startsWith("id:")) this.id = line.slice(3).trim();
      else if (line === "" && this.data.length) {
        events.push({ id: this.id, data: this.data.join("\n") });
        this.data = [];
      }
    }
    return events;
  }
}

// The tokens of a choice as `[text, probability, [[text, probability], ...]]`, in the same form for both routes.
function tokensOf({ logprobs: found }) {
  if (!found) return [];
  if (found.content) {
    return found.content.map((entry) => [
      entry.token,
      Math.exp(entry.logprob),
      entry.top_logprobs.map((other) => [other.token, Math.exp(other.logprob)]),
    ]);
  }
  return (found.tokens ?? []).map((text, index) => [
    text,
    Math.exp(found.token_logprobs[index] ?? 0),
    Object.entries(found.top_logprobs?.[index] ?? {}).map(([token, value]) => [token, Math.exp(value)]),
  ]);
}

// The token that ends an answer has a probability, and is no part of the text.
function withoutEndToken(tokens, choice, text) {
  const isEnd = choice.finish_reason === "stop" && tokens.length && !text.endsWith(tokens.at(-1)[0]);
  return isEnd ? tokens.slice(0, -1) : tokens;
}

// Adds a chunk of either route to an answer.
function addChunk(answer, chunk, nowMs = Date.now()) {
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? { content: choice.text };
  const text = delta.content ?? "";
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  if (reasoning) answer.reasoning = (answer.reasoning ?? "") + reasoning;
  for (const call of delta.tool_calls ?? []) addCall((answer.toolCalls ??= []), call);
  answer.content += text;
  const tokens = withoutEndToken(tokensOf(choice), choice, text);
  if (tokens.length) (answer.tokens ??= []).push(...tokens);
  if (text || reasoning || delta.tool_calls) {
    answer.times.firstMs ??= nowMs;
    answer.times.lastMs = nowMs;
  }
  if (choice.finish_reason === "length") answer.note = "the longest answer is reached";
}

function addCall(calls, { index, id, function: part }) {
  const call = (calls[index] ??= { id: id ?? "", name: "", arguments: "" });
  if (id) call.id = id;
  call.name += part?.name ?? "";
  call.arguments += part?.arguments ?? "";
}

// What is said below an answer that has ended.
function factsOf(answer) {
  const { usage, times, note } = answer;
  const facts = [];
  if (times?.firstMs && !times.isResumed) facts.push(`first token after ${Math.round(times.firstMs - times.startMs)} ms`);
  const tokens = usage?.completion_tokens;
  if (tokens) facts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  const seconds = times?.firstMs ? (times.lastMs - times.firstMs) / 1000 : 0;
  if (tokens > 1 && seconds > 0 && !times.isResumed) facts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens per second`);
  if (note) facts.push(note);
  return facts.join(" · ");
}
