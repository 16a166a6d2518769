// A chat: its messages, what of them a request carries, and how it is exported. Nothing here knows the page.
//
// A message is `{role, content}`. One of the user may have `pictures` (`{name, url}`), of which some may be sounds. An answer may have `reasoning`, `toolCalls` (`{id, name, arguments}`), `tokens`,
// `note`, `facts`, and `stream` (`{id, after}`) while the server still has more of it.

const MAX_TITLE_CHARS = 60;
// Longest answer where neither the user nor the model sets one: without it a small model may never end.
const DEFAULT_MAX_TOKENS = 1024;

function newChat(settings, nowMs = Date.now()) {
  const id = crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16)).join("");
  return { id, title: "New chat", isNamed: false, createdMs: nowMs, updatedMs: nowMs, settings, messages: [] };
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  const characters = [...line];
  return characters.length > MAX_TITLE_CHARS ? `${characters.slice(0, MAX_TITLE_CHARS - 1).join("")}…` : line || "New chat";
}

function isEmptyAnswer(message) {
  return message.role === "assistant" && !message.content && !message.toolCalls?.length;
}

// Messages in the form of the API.
function apiMessages(chat, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const message of chat.messages) {
    if (isEmptyAnswer(message)) continue;
    const { role, content, toolCalls, callId, pictures } = message;
    if (role === "tool") messages.push({ role, content, tool_call_id: callId });
    else if (pictures?.length) messages.push({ role, content: apiParts(message) });
    else if (!toolCalls?.length) messages.push({ role, content });
    else messages.push({ role, content, tool_calls: toolCalls.map(apiCall) });
  }
  return messages;
}

// Pictures and sounds stand before the text, as in the templates of most models.
function apiParts({ pictures, content }) {
  const parts = pictures.map((file) => {
    const type = isSound(file) ? "audio_url" : "image_url";
    return { type, [type]: { url: file.url } };
  });
  return content ? [...parts, { type: "text", text: content }] : parts;
}

function apiCall({ id, name, arguments: given }) {
  return { id, type: "function", function: { name, arguments: given } };
}

// The longest answer that is asked for; undefined leaves it to the server. `model` is its object in `/v1/models`.
function longestAnswer(settings, model) {
  if (settings.max_tokens) return Number(settings.max_tokens);
  return model?.chat?.default_max_tokens ? undefined : defaultLength(model);
}

function defaultLength(model) {
  return Math.min(DEFAULT_MAX_TOKENS, Math.floor((model?.max_model_len ?? 2 * DEFAULT_MAX_TOKENS) / 2));
}

function parsedSetting(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} in the settings is no JSON: ${error.message}.`);
  }
}

// The body of the request for the answer that comes next; `isContinued`: for more of the last one.
function requestBody(chat, model, isContinued = false) {
  const settings = chat.settings;
  const body = { model: model?.id, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "seed"]) {
    if (settings[name]) body[name] = Number(settings[name]);
  }
  const length = longestAnswer(settings, model);
  if (length) body.max_tokens = length;
  return settings.mode === "completion" ? completionBody(body, chat, isContinued) : chatBody(body, chat, model, isContinued);
}

function completionBody(body, chat, isContinued) {
  const last = chat.messages.at(isContinued ? -2 : -1);
  const prompt = last.content + (isContinued ? chat.messages.at(-1).content : "");
  return { ...body, prompt, ...(chat.settings.logprobs && { logprobs: 5 }) };
}

function chatBody(body, chat, model, isContinued) {
  const { settings } = chat;
  const usesSystem = model?.chat?.has_system_prompt !== false;
  const made = { ...body, messages: apiMessages(chat, usesSystem ? settings.system?.trim() : "") };
  if (settings.logprobs) Object.assign(made, { logprobs: true, top_logprobs: 5 });
  if (settings.schema?.trim()) {
    const schema = parsedSetting("The JSON schema", settings.schema);
    made.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  if (settings.tools?.trim()) made.tools = toolsOf(parsedSetting("The list of tools", settings.tools));
  if (isContinued) Object.assign(made, { continue_final_message: true, add_generation_prompt: false });
  return made;
}

// Tools as the API wants them, from a list of them or of their functions alone.
function toolsOf(given) {
  const list = Array.isArray(given) ? given : [given];
  return list.map((tool) => (tool?.type === "function" ? tool : { type: "function", function: tool }));
}

// Whether more of the last answer can be asked for.
function canContinue(chat) {
  const last = chat.messages.at(-1);
  return last?.role === "assistant" && Boolean(last.content) && !last.toolCalls?.length && Boolean(last.note);
}

// The calls of the last answer that have no result yet.
function openCalls(chat) {
  const answered = new Set(chat.messages.filter(({ role }) => role === "tool").map(({ callId }) => callId));
  const last = chat.messages.findLast(({ role }) => role === "assistant");
  return (last?.toolCalls ?? []).filter(({ id }) => !answered.has(id));
}

function lastQuestion(chat) {
  return chat.messages.findLastIndex(({ role }) => role === "user");
}

const SPEAKERS = { user: "You", assistant: "Model", tool: "Result of the tool" };

function exportedMarkdown(chat) {
  const parts = [`# ${chat.title}`];
  if (chat.settings.system?.trim()) parts.push("## System prompt", chat.settings.system.trim());
  for (const { role, content, toolCalls, pictures } of chat.messages) {
    parts.push(`## ${SPEAKERS[role]}`);
    for (const file of pictures ?? []) {
      parts.push(`${isSound(file) ? "" : "!"}[${file.name.replace(/[[\]\\]/g, "")}](${file.url})`);
    }
    parts.push(content);
    for (const call of toolCalls ?? []) parts.push(`\`${call.name}\`\n\n\`\`\`json\n${call.arguments}\n\`\`\``);
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

function exportedJson(chat) {
  const { title, createdMs, settings, messages } = chat;
  const kept = messages.map(({ role, content, reasoning, toolCalls, callId, pictures }) => ({
    role, content, pictures: pictures?.length ? pictures : undefined, reasoning: reasoning || undefined, tool_calls: toolCalls?.length ? toolCalls.map(apiCall) : undefined,
    tool_call_id: callId,
  }));
  return JSON.stringify({ title, created: new Date(createdMs).toISOString(), settings, messages: kept }, null, 2);
}

function fileName(title) {
  return title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
}
