// The list of chats, with what can be done with each, and the drawer that holds it on a narrow screen.

class Sidebar {
  // `actions`: what its buttons do with the id of a chat.
  constructor(actions) {
    this.actions = actions;
    this.root = byId("sidebar");
    byId("open-sidebar").addEventListener("click", () => this.setOpen(true));
    byId("close-sidebar").addEventListener("click", () => this.setOpen(false));
    byId("shade").addEventListener("click", () => this.setOpen(false));
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.setOpen(false);
    });
    matchMedia("(max-width: 50rem)").addEventListener("change", () => this.setOpen(false));
  }

  setOpen(isOpen) {
    const wasOpen = this.root.classList.contains("open");
    this.root.classList.toggle("open", isOpen);
    byId("shade").hidden = !isOpen;
    byId("talk").inert = isOpen;
    if (isOpen) byId("new-chat").focus();
    else if (wasOpen) byId("open-sidebar").focus();
  }

  show(chats, currentId, runningIds) {
    byId("no-chats").hidden = chats.length > 0;
    byId("chats").replaceChildren(...chats.map((chat) => this.row(chat, chat.id === currentId, runningIds.has(chat.id))));
  }

  row({ id, title }, isCurrent, isRunning) {
    const item = element("li");
    const open = button(title, "open-chat", () => {
      this.setOpen(false);
      this.actions.open(id);
    });
    if (isCurrent) open.setAttribute("aria-current", "page");
    if (isRunning) open.append(element("span", " (answering)", "quiet"));
    item.append(open, this.menu(id, title));
    return item;
  }

  menu(id, title) {
    const menu = element("details", undefined, "menu");
    const summary = element("summary", "⋯");
    summary.setAttribute("aria-label", `Actions for ${title}`);
    const choices = element("div");
    const choice = (name, act) => choices.append(button(name, "quiet", () => {
      menu.open = false;
      act();
    }));
    choice("Rename", () => this.askForTitle(id, title));
    choice("Export as Markdown", () => this.actions.exportMarkdown(id));
    choice("Export as JSON", () => this.actions.exportJson(id));
    choice("Delete", () => this.confirmDelete(id, title));
    menu.append(summary, choices);
    menu.addEventListener("focusout", ({ relatedTarget }) => {
      if (!menu.contains(relatedTarget)) menu.open = false;
    });
    return menu;
  }

  askForTitle(id, title) {
    byId("title-field").value = title;
    onceSubmitted("rename-dialog", () => {
      const given = byId("title-field").value.trim();
      if (given) this.actions.rename(id, given);
    });
    byId("title-field").select();
  }

  confirmDelete(id, title) {
    byId("delete-name").textContent = title;
    onceSubmitted("delete-dialog", () => this.actions.remove(id));
  }
}

// Opens a dialog, and acts when its form is submitted by another button than the one that closes it.
function onceSubmitted(id, act) {
  const dialog = byId(id);
  dialog.returnValue = "";
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "yes") act();
  }, { once: true });
  dialog.showModal();
}
