// The chat page. Addresses are relative, so that they stay valid under the prefix of a proxy.

const byId = (id) => document.getElementById(id);
const state = { key: "", messages: [], running: null, samples: [], lastTokens: null };

function headers() {
  const given = { "content-type": "application/json" };
  if (state.key) given.authorization = `Bearer ${state.key}`;
  return given;
}

async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(), credentials: "omit" });
  if (answer.ok) return answer;
  if (answer.status === 401) byId("key-dialog").showModal();
  let message = `The server answers with HTTP ${answer.status}.`;
  try {
    message = (await answer.json()).error.message || message;
  } catch {
    // Not an error of this server, such as one of a proxy.
  }
  throw new Error(message);
}

async function loadModels() {
  const models = (await (await call("v1/models")).json()).data;
  const options = models.map((model) => {
    const option = element("option", model.parent ? `${model.id} (adapter of ${model.parent})` : model.id);
    option.value = model.id;
    return option;
  });
  byId("model").replaceChildren(...options);
}

function say(text) {
  byId("status").textContent = text;
}

function number(id) {
  const text = byId(id).value.trim();
  return text === "" ? undefined : Number(text);
}

function requestBody(isChat, prompt) {
  const body = { model: byId("model").value, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = number(name);
    if (value !== undefined) body[name] = value;
  }
  const showsTokens = byId("logprobs").checked;
  if (!isChat) return { ...body, prompt, max_tokens: body.max_tokens ?? 256, ...(showsTokens && { logprobs: 5 }) };
  const system = byId("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...state.messages];
  return { ...body, messages, ...(showsTokens && { logprobs: true, top_logprobs: 5 }) };
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// The tokens of a chunk with their probabilities, in the same form for both routes.
function tokensOf(choice) {
  const found = choice.logprobs;
  if (!found) return [];
  if (found.content) {
    return found.content.map((entry) => ({
      text: entry.token,
      probability: Math.exp(entry.logprob),
      others: entry.top_logprobs.map((other) => [other.token, Math.exp(other.logprob)]),
    }));
  }
  return found.tokens.map((text, index) => ({
    text,
    probability: Math.exp(found.token_logprobs[index] ?? 0),
    others: Object.entries(found.top_logprobs?.[index] ?? {}).map(([token, value]) => [token, Math.exp(value)]),
  }));
}

// One answer on the page, as it grows.
class Answer {
  constructor() {
    this.text = "";
    this.tokens = [];
    this.usage = null;
    this.root = element("article", undefined, "message assistant");
    this.reasoning = element("details");
    this.reasoning.append(element("summary", "Reasoning"), element("p", "", "text"));
    this.reasoning.hidden = true;
    this.body = element("div", undefined, "text");
    this.facts = element("p", "", "facts");
    this.root.append(element("h2", "Model"), this.reasoning, this.body, this.facts);
    this.startMs = performance.now();
    this.firstMs = null;
  }

  add(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const reasoning = choice.delta?.reasoning ?? choice.delta?.reasoning_content;
    if (reasoning) {
      this.reasoning.hidden = false;
      this.reasoning.lastChild.textContent += reasoning;
    }
    const text = choice.delta ? choice.delta.content : choice.text;
    if ((text || reasoning) && this.firstMs === null) this.firstMs = performance.now();
    this.text += text ?? "";
    for (const token of tokensOf(choice)) this.addToken(token);
    if (choice.finish_reason === "length") this.note = "the answer has reached its longest length";
  }

  addToken(token) {
    if (!this.tokens.length) {
      this.body.className = "tokens";
      this.body.tabIndex = 0;
      this.body.setAttribute("role", "group");
      this.body.setAttribute("aria-label", "Answer by tokens; the arrow keys choose one");
      this.body.replaceChildren();
      this.body.tokens = this.tokens;
    }
    const level = Math.min(4, 1 + Math.floor(token.probability * 4));
    this.body.append(element("span", token.text, `p${level}`));
    this.tokens.push(token);
  }

  show() {
    if (!this.tokens.length) this.body.replaceChildren(...markdownNodes(this.text));
  }

  finish() {
    this.show();
    const facts = [];
    const tokens = this.usage?.completion_tokens;
    const seconds = (performance.now() - (this.firstMs ?? this.startMs)) / 1000;
    if (this.firstMs !== null) facts.push(`first token after ${Math.round(this.firstMs - this.startMs)} ms`);
    if (tokens > 1) facts.push(`${tokens} tokens`, `${((tokens - 1) / seconds).toFixed(1)} tokens per second`);
    if (this.note) facts.push(this.note);
    this.facts.textContent = facts.join(", ");
  }
}

function addMessage(role, text) {
  const message = element("article", undefined, `message ${role}`);
  message.append(element("h2", role === "user" ? "You" : "Error"));
  message.append(element(role === "user" ? "div" : "p", text, role === "user" ? "text" : "error"));
  append(message);
}

function append(node) {
  byId("messages").append(node);
  byId("messages").scrollTop = byId("messages").scrollHeight;
}

function setRunning(controller) {
  state.running = controller;
  byId("stop").hidden = controller === null;
  byId("send").hidden = controller !== null;
}

async function send(prompt) {
  const isChat = byId("mode").value === "chat";
  const conversation = state.messages; // "New chat" begins another one
  addMessage("user", prompt);
  if (isChat) conversation.push({ role: "user", content: prompt });
  const answer = new Answer();
  const controller = new AbortController();
  setRunning(controller);
  say("The model answers …");
  try {
    const path = isChat ? "v1/chat/completions" : "v1/completions";
    const body = JSON.stringify(requestBody(isChat, prompt));
    const response = await call(path, { method: "POST", body, signal: controller.signal });
    append(answer.root);
    const log = byId("messages");
    let drawn = 0;
    for await (const event of events(response)) {
      answer.add(event);
      if (performance.now() - drawn < 50) continue; // drawing for each token costs more than the tokens
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      answer.show();
      if (isAtEnd) log.scrollTop = log.scrollHeight;
      drawn = performance.now();
    }
    say("The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") answer.note = "stopped";
    else addMessage("error", error.message);
    say(error.name === "AbortError" ? "Stopped." : "The request failed.");
  }
  answer.finish();
  if (isChat && answer.text) conversation.push({ role: "assistant", content: answer.text });
  else if (isChat) conversation.pop();
  setRunning(null);
}

function showToken(container, index) {
  const token = container.tokens[index];
  if (!token) return;
  container.querySelector(".chosen")?.classList.remove("chosen");
  container.children[index].classList.add("chosen");
  container.chosen = index;
  const percent = (value) => ` ${(100 * value).toFixed(1)} %`;
  const others = token.others.length ? token.others : [[token.text, token.probability]];
  byId("alternatives").replaceChildren(
    ...others.map(([text, value]) => {
      const item = element("li");
      item.append(element("code", JSON.stringify(text)), document.createTextNode(percent(value)));
      if (text === token.text) item.append(element("strong", " (chosen)"));
      return item;
    }),
  );
  byId("token").hidden = false;
}

function sample(text, name) {
  let sum = null;
  for (const line of text.split("\n")) {
    if (line.startsWith(`${name}{`) || line.startsWith(`${name} `)) {
      sum = (sum ?? 0) + Number(line.slice(line.lastIndexOf(" ") + 1));
    }
  }
  return sum;
}

async function drawLoad() {
  if (!byId("load").open || document.hidden) return;
  const text = await (await call("metrics")).text();
  byId("running").textContent = sample(text, "vllm:num_requests_running") ?? "–";
  byId("waiting").textContent = sample(text, "vllm:num_requests_waiting") ?? "–";
  const cache = sample(text, "vllm:kv_cache_usage_perc");
  byId("cache").textContent = cache === null ? "–" : `${(100 * cache).toFixed(1)} %`;
  const now = { tokens: sample(text, "vllm:generation_tokens_total") ?? 0, timeMs: performance.now() };
  const last = state.lastTokens;
  state.lastTokens = now;
  if (last === null) return;
  const speed = Math.max(0, ((now.tokens - last.tokens) * 1000) / (now.timeMs - last.timeMs));
  state.samples = [...state.samples, speed].slice(-60);
  byId("speed").textContent = speed.toFixed(1);
  const top = Math.max(1, ...state.samples);
  const points = state.samples.map((value, index) => `${index * 2},${31 - (30 * value) / top}`);
  byId("chart").firstElementChild.setAttribute("points", points.join(" "));
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = byId("prompt").value;
  if (!prompt.trim() || state.running) return;
  byId("prompt").value = "";
  send(prompt);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("stop").addEventListener("click", () => state.running?.abort());
byId("new-chat").addEventListener("click", () => {
  state.running?.abort();
  state.messages = [];
  byId("messages").replaceChildren();
  byId("token").hidden = true;
  say("");
  byId("prompt").focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = byId("key").value.trim();
  byId("key").value = "";
  byId("key-dialog").close();
  start();
});
byId("messages").addEventListener("mouseover", (event) => {
  const container = event.target.parentElement;
  if (container?.tokens) showToken(container, [...container.children].indexOf(event.target));
});
byId("messages").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !event.target.tokens) return;
  event.preventDefault();
  showToken(event.target, (event.target.chosen ?? -1) + step);
});
byId("load").addEventListener("toggle", () => drawLoad().catch((error) => say(error.message)));
setInterval(() => drawLoad().catch((error) => say(error.message)), 2000);

function start() {
  loadModels().then(
    () => say(""),
    (error) => say(error.message),
  );
}

start();
