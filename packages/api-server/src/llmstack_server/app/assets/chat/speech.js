// Speech: a microphone or a sound file becomes text, which stands in the chat while it comes.

const RATE = 16000;
const CHUNK = RATE / 10; // samples of a message
const TOKEN = /^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/; // what may stand in the name of a subprotocol
const WORKLET = `registerProcessor("samples", class extends AudioWorkletProcessor {
  process([[samples]]) { if (samples) this.port.postMessage(samples.slice()); return true; }
});`;

const speech = { running: null };

// Samples from -1 to 1 as integers of 16 bits.
function pcmOf(samples) {
  return Int16Array.from(samples, (one) => Math.max(-32768, Math.min(32767, Math.round(one * 32768))));
}

function base64Of(integers) {
  const bytes = new Uint8Array(integers.buffer, integers.byteOffset, integers.byteLength);
  return btoa(String.fromCharCode(...bytes));
}

// A WAV file of parts that each are integers of 16 bits.
function wavOf(parts) {
  const size = parts.reduce((sum, one) => sum + one.byteLength, 0);
  const head = new DataView(new ArrayBuffer(44));
  const write = (place, text) => [...text].forEach((char, index) => head.setUint8(place + index, char.charCodeAt(0)));
  write(0, "RIFF");
  head.setUint32(4, 36 + size, true);
  write(8, "WAVEfmt ");
  head.setUint32(16, 16, true);
  head.setUint16(20, 1, true);
  head.setUint16(22, 1, true);
  head.setUint32(24, RATE, true);
  head.setUint32(28, RATE * 2, true);
  head.setUint16(32, 2, true);
  head.setUint16(34, 16, true);
  write(36, "data");
  head.setUint32(40, size, true);
  return new File([head, ...parts], "recording.wav", { type: "audio/wav" });
}

// A microphone, whose samples `onSamples` gets as they come.
class Microphone {
  async open(onSamples) {
    this.stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    this.context = new AudioContext({ sampleRate: RATE });
    const url = URL.createObjectURL(new Blob([WORKLET], { type: "text/javascript" }));
    try {
      await this.context.audioWorklet.addModule(url);
    } finally {
      URL.revokeObjectURL(url);
    }
    this.node = new AudioWorkletNode(this.context, "samples", { numberOfOutputs: 0 });
    this.node.port.onmessage = ({ data }) => onSamples(data);
    this.context.createMediaStreamSource(this.stream).connect(this.node);
  }

  close() {
    if (this.node) this.node.port.onmessage = null;
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    if (this.context?.state !== "closed") this.context?.close();
  }
}

// A realtime session: sound goes out, text comes in.
class LiveSession {
  // `onText` gets each further piece of text.
  constructor(onText) {
    this.onText = onText;
    this.done = new Promise((resolve, reject) => Object.assign(this, { resolve, reject }));
    this.done.catch(() => {}); // whoever waits for it is told
  }

  async open(model) {
    const url = new URL("v1/realtime", location.href);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    url.search = url.hash = "";
    const names = server.key ? ["realtime", `openai-insecure-api-key.${server.key}`] : ["realtime"];
    this.socket = new WebSocket(url, names);
    this.socket.onmessage = ({ data }) => this.take(JSON.parse(data));
    this.socket.onclose = () => this.reject(new LostConnection("The connection ended before the text did."));
    const opened = new Promise((resolve) => { this.onOpen = resolve; });
    await Promise.race([opened, this.done]);
    const input = { format: { type: "audio/pcm", rate: RATE }, transcription: { model }, turn_detection: null };
    this.tell({ type: "session.update", session: { type: "transcription", audio: { input } } });
  }

  tell(event) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(event));
  }

  add(integers) {
    this.tell({ type: "input_audio_buffer.append", audio: base64Of(integers) });
  }

  commit() {
    this.tell({ type: "input_audio_buffer.commit" });
    return this.done;
  }

  close() {
    this.socket?.close();
  }

  take({ type, delta, transcript, error }) {
    if (type === "session.created") this.onOpen();
    else if (type.endsWith("transcription.delta")) this.onText(delta);
    else if (type.endsWith("transcription.completed")) this.resolve(transcript);
    else if (error) this.reject(new ServerError(error.message, 200, error.code));
  }
}

// The text of a file, whose pieces `onText` gets as they come.
async function transcribeFile(file, model, onText) {
  const form = new FormData();
  form.append("model", model);
  form.append("stream", "true");
  form.append("file", file);
  const answer = await call("v1/audio/transcriptions", { method: "POST", body: form });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new LostConnection("The connection ended before the text did.");
    for (const { data } of parser.add(value)) {
      if (data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message, 200, event.error.code);
      if (event.type === "transcript.text.delta") onText(event.delta);
      if (event.type === "transcript.text.done") return event.text;
    }
  }
}

// Runs one recording or file, and keeps its text in the chat. `work` gets what takes pieces of text.
async function transcribe(title, work) {
  const { chat } = state;
  const before = [...chat.messages];
  const made = { role: "assistant", content: "", isTranscript: true, times: { startMs: Date.now() } };
  if (!before.length && !chat.isNamed) chat.title = title;
  chat.messages.push({ role: "user", content: title, isTranscript: true }, made);
  list.isFollowing = true;
  const showText = () => {
    if (state.chat === chat) list.show(chat, { isRunning: speech.running !== null });
  };
  show();
  try {
    made.content = await work((text) => {
      made.content += text;
      showText();
    });
    say(made.content ? "The text is complete." : "Nothing was said.", { isPassing: true });
  } catch (error) {
    if (made.content) made.note = `it broke off: ${error.message}`;
    else chat.messages = before;
    say(error.message);
  } finally {
    speech.running = null;
    showSpeech();
  }
  if (chat.messages.length) await saveChat(chat);
  show();
  await showChats();
}

async function record() {
  const model = models.current();
  const microphone = new Microphone();
  const parts = [];
  let waiting = new Float32Array(0);
  let session = null;
  const pass = (integers) => (session ? session.add(integers) : parts.push(integers));
  const stopped = new Promise((resolve) => { speech.running = resolve; });
  showSpeech();
  await transcribe("Recording", async (onText) => {
    try {
      if (model.speech.realtime && (!server.key || TOKEN.test(server.key))) {
        session = new LiveSession(onText);
        await session.open(model.id);
      }
      await microphone.open((samples) => {
        const joined = new Float32Array(waiting.length + samples.length);
        joined.set(waiting);
        joined.set(samples, waiting.length);
        waiting = joined.length < CHUNK ? joined : new Float32Array(0);
        if (joined.length >= CHUNK) pass(pcmOf(joined));
      });
      say("Listening …");
      await Promise.race([stopped, ...(session ? [session.done] : [])]);
      microphone.close();
      pass(pcmOf(waiting));
      say("The last words come …");
      return await (session ? session.commit() : transcribeFile(wavOf(parts), model.id, onText));
    } finally {
      microphone.close();
      session?.close();
    }
  });
}

async function takeSound(file) {
  speech.running = () => {};
  showSpeech();
  say("The file is read …");
  await transcribe(file.name, (onText) => transcribeFile(file, models.current().id, onText));
}

// A model that transcribes has these buttons, and takes no messages.
function showSpeech() {
  const facts = models.current()?.speech;
  const isRunning = speech.running !== null;
  byId("record").hidden = !facts || isRunning || !navigator.mediaDevices?.getUserMedia;
  byId("add-sound").hidden = !facts || isRunning;
  byId("stop-recording").hidden = !facts || !isRunning || speech.running.length === 0;
  for (const id of ["prompt", "open-settings"]) byId(id).hidden = Boolean(facts);
  for (const one of document.querySelectorAll(".of-text")) one.hidden = Boolean(facts);
  byId("greeting-title").textContent = facts ? "Say something." : "What shall we talk about?";
  if (facts) byId("send").hidden = true;
}

byId("record").addEventListener("click", () => record().catch(complain));
byId("stop-recording").addEventListener("click", () => speech.running?.());
byId("add-sound").addEventListener("click", () => byId("sound-file").click());
byId("sound-file").addEventListener("change", ({ target }) => {
  const [file] = target.files;
  target.value = ""; // so that the same file can be chosen again
  if (file) takeSound(file).catch(complain);
});
