// The probability of each token of an answer, for the mouse and the arrow keys.

function drawTokens(container, tokens) {
  if (container.tokens !== tokens) {
    container.replaceChildren();
    container.tokens = tokens;
    container.tabIndex = 0;
    container.setAttribute("role", "group");
    container.setAttribute("aria-label", "Answer by tokens; the arrow keys choose one");
  }
  for (const [text, probability] of tokens.slice(container.childNodes.length)) {
    container.append(element("span", text, `p${Math.min(4, 1 + Math.floor(probability * 4))}`));
  }
}

function showToken(container, index) {
  const token = container.tokens[index];
  if (!token) return;
  container.querySelector(".chosen")?.classList.remove("chosen");
  container.children[index].classList.add("chosen");
  container.chosen = index;
  const [text, probability, others] = token;
  const rows = (others.length ? others : [[text, probability]]).map(([other, value]) => {
    const item = element("li");
    item.append(element("code", JSON.stringify(other)), ` ${(100 * value).toFixed(1)} %`);
    if (other === text) item.append(element("strong", " (chosen)"));
    return item;
  });
  byId("alternatives").replaceChildren(...rows);
  byId("token").hidden = false;
}

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
byId("close-token").addEventListener("click", () => { byId("token").hidden = true; });
