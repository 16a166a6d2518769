// Requests to the server. Addresses are relative, so that they stay valid under the prefix of a proxy.

const KEEP_S = 60; // how long the server keeps an answer without a reader: a reload takes less
const RETRIES_MS = [300, 1000, 2000, 4000, 8000];
const server = { key: "", isLocked: false }; // a key stays here, in memory

class ServerError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

class LostConnection extends Error {}

async function call(path, options = {}, extraHeaders = {}) {
  const isJson = typeof options.body === "string"; // the type of a form is the browser's
  const headers = { ...(isJson && { "content-type": "application/json" }), ...extraHeaders };
  if (server.key) headers.authorization = `Bearer ${server.key}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new LostConnection("The server does not answer.");
  }
  if (answer.ok) return answer;
  if (answer.status === 401) askForKey(); // the page has one to ask with
  let found = {};
  try {
    found = (await answer.json()).error ?? {};
  } catch {
    // Not an error of this server, such as one of a proxy.
  }
  throw new ServerError(found.message || `The server answers with HTTP ${answer.status}.`, answer.status, found.code);
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// One answer while it comes. It goes on after a lost connection, and after a reload of the page, where the server
// left off: `answer.stream` says where that is.
class Turn {
  // `onChange` is called after each piece of the answer.
  constructor(chat, answer, onChange) {
    this.chat = chat;
    this.answer = answer;
    this.onChange = onChange;
    this.controller = new AbortController();
    this.isStopped = false;
    this.stopped = new Promise((resolve) => { this.onStop = resolve; });
  }

  // Asks for the answer, or for the rest of it where there is no body; returns when it is complete.
  async run(path, body) {
    const reading = this.readAll(() => (body ? this.ask(path, body) : this.askForRest())).catch((error) => {
      if (!this.isStopped) throw error;
    });
    await Promise.race([reading, this.stopped]);
    delete this.answer.stream;
  }

  async readAll(open) {
    for (let tries = 0, ask = open; ; ask = () => this.askForRest()) {
      const before = this.answer.stream?.after;
      try {
        return await this.read(await ask());
      } catch (error) {
        if (!(error instanceof LostConnection) || !this.answer.stream || this.isStopped) throw error;
        if (this.answer.stream.after !== before) tries = 0;
        if (tries >= RETRIES_MS.length) throw error;
        say("The connection is lost. The page tries again …");
        await pause(RETRIES_MS[tries]);
        tries += 1;
      }
    }
  }

  async ask(path, body) {
    const send = (given) => {
      const options = { method: "POST", body: JSON.stringify(given), signal: this.controller.signal };
      return call(path, options, { "x-llmstack-resume": String(KEEP_S) });
    };
    try {
      return await send(body);
    } catch (error) {
      // The page's own length does not fit behind a long conversation: what fits is shorter.
      if (error.code !== "context_length_exceeded" || this.chat.settings.max_tokens || !body.max_tokens) throw error;
      return send({ ...body, max_tokens: undefined });
    }
  }

  askForRest() {
    const { id, after } = this.answer.stream;
    return call(`v1/streams/${id}?after=${after}`, { signal: this.controller.signal });
  }

  async read(response) {
    const id = response.headers.get("x-llmstack-stream-id");
    if (id && response.headers.get("x-llmstack-resumable") === "true") {
      this.answer.stream = { id, after: this.answer.stream?.id === id ? this.answer.stream.after : 0 };
    }
    if (this.isStopped) return this.leave();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new EventParser();
    for (;;) {
      const { value, done } = await this.next(reader);
      if (done) throw new LostConnection("The connection ended before the answer did.");
      for (const event of parser.add(value)) {
        if (event.data === "[DONE]") return undefined;
        this.take(event);
      }
      this.onChange(this);
    }
  }

  async next(reader) {
    try {
      return await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new LostConnection("The connection ended before the answer did.");
    }
  }

  take({ id, data }) {
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, 200, chunk.error.code);
    addChunk(this.answer, chunk);
    if (this.answer.stream && id) this.answer.stream.after = Number(id.slice(id.indexOf(".") + 1));
  }

  // Ends the answer here and on the server, which would otherwise wait for another reader. Before the first byte the
  // page does not know its id, and ends it when it comes.
  stop() {
    this.isStopped = true;
    this.answer.note = "stopped";
    if (this.answer.stream) this.leave();
    this.onStop();
  }

  leave() {
    const { stream } = this.answer;
    delete this.answer.stream;
    this.controller.abort();
    if (stream) call(`v1/streams/${stream.id}`, { method: "DELETE", keepalive: true }).catch(() => {});
  }
}
