// The settings of the chat that is shown: fields of the dialog, kept with the chat and taken over by the next one.

const TEXT_SETTINGS = ["mode", "system", "temperature", "top_p", "max_tokens", "seed", "schema", "tools"];

function readSettings() {
  const settings = Object.fromEntries(TEXT_SETTINGS.map((name) => [name, byId(name).value]));
  return { ...settings, logprobs: byId("logprobs").checked };
}

function showSettings(settings) {
  for (const name of TEXT_SETTINGS) byId(name).value = settings?.[name] ?? (name === "mode" ? "chat" : "");
  byId("logprobs").checked = Boolean(settings?.logprobs);
  showMode();
}

// Fields that the mode or the model does not use are not offered.
function showMode() {
  const isChat = byId("mode").value === "chat";
  byId("system-field").hidden = !isChat || models.current()?.chat?.has_system_prompt === false;
  for (const id of ["schema-field", "tools-field"]) byId(id).hidden = !isChat;
  const limits = fileLimits();
  byId("add-files").hidden = !limits;
  if (limits) {
    byId("add-files").textContent = `Add ${kindsText(limits, "files", "s")}`;
    byId("files").accept = [...(limits.pictures ? PICTURE_TYPES : []), ...(limits.sounds ? ["audio/*"] : [])].join(",");
  }
  tray.draw();
  showSpeech();
}

// What may come as `pictures` and as `sounds`; nothing if the model or the mode takes text only.
function fileLimits() {
  const chat = byId("mode").value === "chat" ? models.current()?.chat : null;
  return chat?.pictures || chat?.sounds ? { pictures: chat.pictures, sounds: chat.sounds } : null;
}

// What the model is, as the server says it.
const models = {
  list: [],
  current() {
    return this.list.find(({ id }) => id === byId("model").value);
  },
};

async function loadModels() {
  const before = byId("model").value;
  models.list = (await (await call("v1/models")).json()).data;
  const options = models.list.map((model) => {
    const name = model.id.split("/").at(-1) || model.id; // a path is long, and its end says what it is
    const option = element("option", model.parent ? `${name} (adapter of ${model.parent})` : name);
    option.value = model.id;
    return option;
  });
  byId("model").replaceChildren(...options);
  if (models.list.some(({ id }) => id === before)) byId("model").value = before;
  showModel();
}

function showModel() {
  const model = models.current();
  const own = model?.chat?.default_max_tokens;
  byId("max_tokens").placeholder = own ? `${own}, the model's` : `${defaultLength(model)}, this page's`;
  byId("greeting-model").textContent = model ? `You talk to ${byId("model").selectedOptions[0].textContent}.` : "";
  if (model?.chat?.has_template === false && !state.chat.messages.length) byId("mode").value = "completion";
  showMode();
}
