// The messages of a chat on the page.

// One message. `actions` are called by its buttons.
class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.root = element("article", undefined, `message ${message.role}`);
    this.body = element("div", undefined, "text");
    this.foot = element("div", undefined, "foot");
    this.facts = element("p", "", "facts");
    this.buttons = element("div", undefined, "actions");
    this.foot.append(this.facts, this.buttons);
    this.root.append(element("h2", SPEAKERS[message.role]));
    if (message.pictures?.length) {
      const pictures = element("div", undefined, "pictures");
      pictures.append(...message.pictures.map(drawnFile));
      this.root.append(pictures);
    }
    if (message.role === "assistant") this.addAnswerParts();
    this.root.append(this.body);
    if (message.role === "assistant") this.root.append(this.calls);
    this.root.append(this.foot);
    this.showsTokens = true;
  }

  addAnswerParts() {
    this.reasoning = element("details", undefined, "reasoning");
    this.reasoning.append(element("summary", "Reasoning"), element("div", "", "plain"));
    this.reasoning.hidden = true;
    this.reasoning.addEventListener("toggle", () => { this.isToggled = this.reasoning.open !== this.opensItself; });
    this.calls = element("div", undefined, "calls");
    this.root.append(this.reasoning);
  }

  // Draws what the message is now. `isRunning`: more of it comes; `isLast`: no later one can be edited under it.
  update({ isRunning = false, isLast = false, chat }) {
    if (this.message.role === "assistant") this.updateAnswer(isRunning, isLast, chat);
    else this.body.textContent = this.message.content;
    this.root.classList.toggle("running", isRunning);
    this.buttons.replaceChildren(...(isRunning ? [] : this.madeButtons(isLast, chat)));
  }

  updateAnswer(isRunning, isLast, chat) {
    const { content, reasoning, tokens, toolCalls, isJson } = this.message;
    if (reasoning) this.showReasoning(reasoning, isRunning && !content);
    if (tokens?.length && this.showsTokens) {
      this.useBody("tokens");
      drawTokens(this.body, tokens);
    } else {
      this.useBody("text");
      drawMarkdown(this.body, isJson ? fenced(content) : content);
    }
    const open = isLast && !isRunning ? openCalls(chat) : [];
    if (toolCalls?.length) this.calls.replaceChildren(...toolCalls.map(drawnCall), ...this.resultForm(open));
    this.facts.textContent = isRunning ? "" : factsOf(this.message);
  }

  // The two forms of an answer are different elements: what one keeps is nothing for the other.
  useBody(className) {
    if (this.body.className === className) return;
    const made = element("div", undefined, className);
    this.body.replaceWith(made);
    this.body = made;
  }

  // Open while the model thinks, folded once it answers, and as the reader wants it after a click.
  showReasoning(text, isThinking) {
    this.reasoning.hidden = false;
    this.reasoning.firstChild.textContent = isThinking ? "Reasoning …" : "Reasoning";
    this.reasoning.lastChild.textContent = text;
    this.opensItself = isThinking;
    if (!this.isToggled) this.reasoning.open = isThinking;
  }

  madeButtons(isLast, chat) {
    const { role, content, tokens } = this.message;
    const { edit, regenerate, goOn } = this.actions;
    const made = content ? [copyButton(() => this.message.content)] : [];
    if (this.message.isTranscript) return made;
    if (role === "user") made.push(button("Edit", "quiet", () => edit(this.message)));
    if (role === "assistant" && isLast) made.push(button("Regenerate", "quiet", regenerate));
    if (role === "assistant" && isLast && canContinue(chat)) made.push(button("Continue", "quiet", goOn));
    if (tokens?.length) made.push(button(this.showsTokens ? "As text" : "As tokens", "quiet", () => this.turnOver(isLast, chat)));
    return made;
  }

  turnOver(isLast, chat) {
    this.showsTokens = !this.showsTokens;
    this.update({ isLast, chat });
    this.buttons.lastChild.focus();
  }

  // What the tools answer is written by the reader, and goes to the model.
  resultForm(calls) {
    if (!calls.length) return [];
    const form = element("form", undefined, "results");
    for (const one of calls) {
      const box = element("textarea");
      box.rows = 2;
      box.required = true;
      const label = element("label", `Result of ${one.name}`);
      label.append(box);
      form.append(label);
    }
    const submit = element("button", "Send the results");
    submit.type = "submit";
    form.append(submit);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const texts = [...form.querySelectorAll("textarea")].map((box) => box.value);
      this.actions.sendResults(calls.map(({ id }, index) => ({ role: "tool", content: texts[index], callId: id })));
    });
    return [form];
  }
}

function fenced(json) {
  const fence = "`".repeat(3 + Math.max(0, ...(json.match(/`+/g) ?? []).map((run) => run.length)));
  return json ? `${fence}json\n${json}\n${fence}` : "";
}

function drawnCall({ name, arguments: given }) {
  const made = element("div", undefined, "call");
  const title = element("p", "Tool call ");
  title.append(element("code", name));
  let shown = given;
  try {
    shown = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // It still comes, or the model ended inside of it: as it is.
  }
  made.append(title, drawn(codeBlock(shown, "json")));
  return made;
}

// All messages of the chat that is shown. It follows the end until the reader scrolls up.
class MessageList {
  constructor(root, actions) {
    this.root = root;
    this.actions = actions;
    this.views = [];
    this.isFollowing = true;
    root.addEventListener("scroll", () => this.noteScroll());
    new ResizeObserver(() => this.follow()).observe(root); // the composer grows, the keyboard of a phone opens
    byId("to-end").addEventListener("click", () => this.toEnd());
  }

  show(chat, { isRunning }) {
    this.root.setAttribute("aria-busy", String(isRunning));
    const { messages } = chat;
    let same = 0;
    while (same < messages.length && this.views[same]?.message === messages[same]) same += 1;
    for (const view of this.views.splice(same)) view.root.remove();
    for (const message of messages.slice(same)) {
      const view = new MessageView(message, this.actions);
      this.views.push(view);
      this.root.append(view.root);
    }
    for (const [index, view] of this.views.entries()) {
      const isLast = index === this.views.length - 1;
      if (isLast || index >= same - 1 || view.wasLast) view.update({ chat, isLast, isRunning: isRunning && isLast });
      view.wasLast = isLast;
    }
    this.follow();
  }

  noteScroll() {
    const rest = this.root.scrollHeight - this.root.scrollTop - this.root.clientHeight;
    const isUp = this.root.scrollTop < this.lastTop;
    this.lastTop = this.root.scrollTop;
    if (rest < 4) this.isFollowing = true;
    else if (isUp) this.isFollowing = false;
    byId("to-end").hidden = this.isFollowing;
  }

  follow() {
    if (!this.isFollowing) return;
    this.root.scrollTop = this.root.scrollHeight;
    this.lastTop = this.root.scrollTop;
  }

  toEnd() {
    this.isFollowing = true;
    byId("to-end").hidden = true;
    this.follow();
  }
}
