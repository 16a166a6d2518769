// The chat page: what its buttons and keys do.

const store = new ChatStore();
const turns = new Map(); // by the id of the chat whose answer comes
const state = { chat: newChat({}), edited: null };
const SAVE_MS = 500;
const DRAW_MS = 50; // drawing for each token costs more than the tokens

const tray = new FileTray(byId("tray"), {
  limits: fileLimits,
  before: () => filesOfMessages(messagesBefore(state.chat, state.edited)),
  onChange: keepDraft,
});
const list = new MessageList(byId("messages"), { edit, regenerate, goOn, sendResults });
const sidebar = new Sidebar({
  open: (id) => openChat(id).catch(complain),
  rename: (id, title) => changeChat(id, (chat) => Object.assign(chat, { title, isNamed: true })),
  remove: (id) => removeChat(id).catch(complain),
  exportMarkdown: (id) => exportChat(id, "md", "text/markdown", exportedMarkdown),
  exportJson: (id) => exportChat(id, "json", "application/json", exportedJson),
});

function complain(error) {
  say(error.message);
}

// ---- what is shown -----------------------------------------------------------------------------------------------

function show() {
  const { chat } = state;
  const isRunning = turns.has(chat.id);
  byId("greeting").hidden = chat.messages.length > 0;
  byId("title").textContent = chat.title;
  byId("stop").hidden = !isRunning;
  byId("send").hidden = isRunning;
  byId("editing").hidden = state.edited === null;
  list.show(chat, { isRunning: isRunning || speech.running !== null });
  showSpeech();
}

async function showChats() {
  sidebar.show(await store.list(), state.chat.id, new Set(turns.keys()));
}

function fitPrompt() {
  const box = byId("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function setPrompt(text, pictures = []) {
  byId("prompt").value = text;
  tray.set(pictures);
  fitPrompt();
  keepDraft();
}

// ---- chats -------------------------------------------------------------------------------------------------------

// A chat of which an answer comes is one object, whoever looks at it.
async function loadChat(id) {
  if (state.chat.id === id) return state.chat;
  return turns.get(id)?.chat ?? store.load(id);
}

async function openChat(id) {
  const chat = await loadChat(id);
  if (chat) await showChat(chat);
}

async function showChat(chat) {
  state.chat = chat;
  state.edited = null;
  history.replaceState(null, "", chat.messages.length ? `#${chat.id}` : location.pathname + location.search);
  showSettings(chat.settings);
  showModel();
  byId("token").hidden = true;
  const draft = await store.value(draftName(chat));
  byId("prompt").value = draft?.text ?? "";
  tray.set(draft?.pictures ?? []);
  fitPrompt();
  say("");
  list.isFollowing = true;
  show();
  await showChats();
  resume(chat);
}

function startChat() {
  sidebar.setOpen(false);
  byId("prompt").focus();
  return showChat(newChat(readSettings()));
}

async function saveChat(chat) {
  chat.updatedMs = Date.now();
  await store.save(chat);
  if (state.chat === chat && location.hash !== `#${chat.id}`) history.replaceState(null, "", `#${chat.id}`);
}

async function changeChat(id, change) {
  const chat = await loadChat(id);
  if (!chat) return;
  change(chat);
  await store.save(chat);
  if (state.chat === chat) show();
  await showChats();
}

async function removeChat(id) {
  turns.get(id)?.stop();
  turns.delete(id);
  await store.remove(id);
  if (state.chat.id === id) await startChat();
  else await showChats();
}

async function exportChat(id, ending, type, write) {
  const chat = await loadChat(id);
  if (chat) download(`${fileName(chat.title)}.${ending}`, type, write(chat));
}

// A chat without messages is in no list: the next new one takes its draft over.
function draftName(chat) {
  return chat.messages.length ? `draft ${chat.id}` : "draft";
}

function keepDraft() {
  const draft = { text: byId("prompt").value, pictures: tray.pictures };
  const isEmpty = !draft.text && !draft.pictures.length;
  store.setValue(draftName(state.chat), isEmpty ? undefined : draft).catch(complain);
}

// ---- answers -----------------------------------------------------------------------------------------------------

async function send(text, pictures = []) {
  const { chat } = state;
  const before = [...chat.messages];
  setPrompt("");
  chat.messages = messagesBefore(chat, state.edited);
  state.edited = null;
  chat.settings = readSettings();
  if (!chat.messages.length && !chat.isNamed) chat.title = titleOf(text.trim() || pictures[0].name);
  chat.messages.push({ role: "user", content: text, ...(pictures.length && { pictures }) });
  await answer(chat, { before, text, pictures });
}

// What stays when a message is replaced: all before it, or all where none is.
function messagesBefore({ messages }, edited) {
  return edited === null ? [...messages] : messages.slice(0, messages.indexOf(edited));
}

function regenerate() {
  const { chat } = state;
  const before = [...chat.messages];
  chat.settings = readSettings();
  chat.messages.splice(chat.messages.findLastIndex(({ role }) => role !== "assistant") + 1);
  return answer(chat, { before });
}

// More of an answer that was stopped, or that reached its length.
function goOn() {
  const { chat } = state;
  chat.settings = { ...readSettings(), schema: "" };
  const last = chat.messages.at(-1);
  const kept = { ...last };
  delete last.note;
  delete last.tokens; // the page would have those of one part only
  return answer(chat, { before: [...chat.messages], continued: last, kept });
}

function sendResults(results) {
  const { chat } = state;
  const before = [...chat.messages];
  chat.messages.push(...results);
  return answer(chat, { before });
}

function edit(message) {
  state.edited = message;
  setPrompt(message.content, message.pictures);
  byId("prompt").focus();
  show();
}

// The pictures of the composer, unless another model or mode was chosen since, which takes none.
function takenPictures() {
  return tray.limits() ? tray.pictures : [];
}

function stopEditing() {
  state.edited = null;
  setPrompt("");
  show();
}

// Asks for the next answer of a chat. Where nothing comes, the chat is as it was `before`, and the text is given back.
async function answer(chat, { before, text, pictures, continued, kept }) {
  const model = models.current();
  const isJson = chat.settings.mode !== "completion" && Boolean(chat.settings.schema?.trim());
  const made = continued ?? { role: "assistant", content: "", ...(isJson && { isJson }) };
  const length = made.content.length;
  made.times = { startMs: Date.now() };
  let body;
  try {
    body = requestBody(chat, model, Boolean(continued));
  } catch (error) {
    return giveBack(chat, { before, text, pictures }, error);
  }
  if (!continued) chat.messages.push(made);
  list.isFollowing = true;
  const path = chat.settings.mode === "completion" ? "v1/completions" : "v1/chat/completions";
  const error = await follow(chat, made, path, body);
  const hasMore = made.content.length > length || made.reasoning || made.toolCalls?.length;
  if (!error || hasMore) return undefined;
  if (continued) Object.assign(continued, kept);
  return giveBack(chat, { before, text, pictures }, error);
}

// Goes on with an answer that came when the page was left.
async function resume(chat) {
  const last = chat.messages.at(-1);
  if (!last?.stream || turns.has(chat.id) || (server.isLocked && !server.key)) return;
  last.times = { ...last.times, isResumed: true };
  await follow(chat, last);
}

// Reads an answer to its end; the error that ended it, if any.
async function follow(chat, made, path, body) {
  let [savedMs, drawnMs] = [0, 0];
  const turn = new Turn(chat, made, () => {
    const now = performance.now();
    if (now - savedMs > SAVE_MS && turns.get(chat.id) === turn) {
      savedMs = now;
      saveChat(chat).catch(complain);
    }
    if (now - drawnMs < DRAW_MS || state.chat !== chat) return;
    list.show(chat, { isRunning: true });
    drawnMs = now;
  });
  turns.set(chat.id, turn);
  say("The model answers …");
  show();
  let failure = null;
  try {
    if (body) await saveChat(chat);
    await showChats();
    await turn.run(path, body);
    say(turn.isStopped ? "Stopped." : "The answer is complete.", { isPassing: true });
  } catch (error) {
    failure = error;
    noteFailure(made, error);
  }
  if (turns.get(chat.id) !== turn) return null; // the chat is deleted
  turns.delete(chat.id);
  if (!isElsewhere(failure)) await saveChat(chat).catch(complain);
  if (state.chat === chat) show();
  await showChats();
  return failure;
}

const isElsewhere = (error) => error?.code === "stream_reader_replaced";

function noteFailure(made, error) {
  if (error.status === 401) {
    say(error.message);
    return; // the stream waits for the key
  }
  delete made.stream;
  made.note = isElsewhere(error) ? "it goes on in another window" : `it broke off: ${error.message}`;
  say(error.status === 404 ? "The server has no more of this answer." : "The request failed.");
}

async function giveBack(chat, { before, text, pictures }, error) {
  chat.messages = before;
  const isSaved = before.length > 0;
  if (isSaved) await saveChat(chat).catch(complain);
  else await store.remove(chat.id).catch(complain);
  if (state.chat === chat) {
    const isUsed = byId("prompt").value || tray.pictures.length;
    if ((text || pictures?.length) && !isUsed) setPrompt(text, pictures);
    if (!isSaved) history.replaceState(null, "", location.pathname + location.search);
    show();
  }
  await showChats();
  say(error.message);
}

// ---- the key -----------------------------------------------------------------------------------------------------

function askForKey() {
  server.isLocked = true;
  server.key = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-form").addEventListener("submit", () => {
  server.key = byId("key").value.trim();
  byId("key").value = "";
  connect().then(() => resume(state.chat));
});

// ---- buttons and keys --------------------------------------------------------------------------------------------

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value;
  const pictures = takenPictures();
  if ((text.trim() || pictures.length) && !turns.has(state.chat.id)) send(text, pictures).catch(complain);
});
byId("prompt").addEventListener("input", () => {
  fitPrompt();
  keepDraft();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    byId("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !event.target.value && !turns.has(state.chat.id)) {
    const last = state.chat.messages[lastQuestion(state.chat)];
    if (last) edit(last);
    event.preventDefault();
  } else if (event.key === "Escape" && state.edited !== null) {
    stopEditing();
  }
});
// Files may be dropped anywhere on the page: a browser would open them in its place.
const filesOf = (event) => [...((event.clipboardData ?? event.dataTransfer)?.files ?? [])];
for (const name of ["paste", "drop"]) {
  document.addEventListener(name, (event) => {
    const files = filesOf(event);
    if (!files.length) return;
    event.preventDefault();
    tray.add(files).catch(complain);
  });
}
document.addEventListener("dragover", (event) => {
  if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
});
byId("add-files").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", ({ target }) => {
  const files = [...target.files];
  target.value = ""; // so that the same file can be chosen again
  tray.add(files).catch(complain);
});
byId("stop").addEventListener("click", () => turns.get(state.chat.id)?.stop());
byId("cancel-edit").addEventListener("click", stopEditing);
byId("new-chat").addEventListener("click", () => startChat().catch(complain));
byId("model").addEventListener("change", showModel);
byId("mode").addEventListener("change", showMode);
byId("open-settings").addEventListener("click", () => byId("settings").showModal());
byId("settings").addEventListener("change", () => {
  state.chat.settings = readSettings();
  store.setValue("settings", state.chat.settings).catch(complain);
  if (state.chat.messages.length) store.save(state.chat).catch(complain);
});
for (const example of document.querySelectorAll("#greeting button")) {
  example.addEventListener("click", () => send(example.textContent, takenPictures()).catch(complain));
}

// ---- start -------------------------------------------------------------------------------------------------------

async function connect() {
  try {
    await loadModels();
    if (!models.current()?.max_model_len) setTimeout(connect, 2000); // the server still starts
    say("");
  } catch (error) {
    say(error.message);
    if (error instanceof LostConnection) setTimeout(connect, 2000);
  }
}

async function start() {
  try {
    await store.open();
  } catch {
    say("This browser keeps no chats: they last until the page is closed.");
  }
  const chat = await store.load(location.hash.slice(1));
  const connected = connect();
  await showChat(chat ?? newChat((await store.value("settings")) ?? readSettings()));
  await connected;
}

start().catch(complain);
