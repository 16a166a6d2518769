// Elements of the page, made with text alone.

const byId = (id) => document.getElementById(id);

function element(name, text, className) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(text, className, onClick) {
  const made = element("button", text, className);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

const PASSING_MS = 4000;

// Says something in the line above the composer, for good or for a moment.
function say(text, { isPassing = false } = {}) {
  byId("status").textContent = text;
  if (!isPassing) return;
  setTimeout(() => {
    if (byId("status").textContent === text) byId("status").textContent = "";
  }, PASSING_MS);
}

// A file for the user to keep.
function download(name, type, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// A button that copies what `textOf` gives, and says so for a moment.
function copyButton(textOf) {
  const made = button("Copy", "quiet", async () => {
    try {
      await copyText(textOf());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not copied";
    }
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  return made;
}

// Over plain HTTP to another machine there is no clipboard object.
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = element("textarea");
  box.value = text;
  document.body.append(box);
  box.select();
  const isDone = document.execCommand("copy");
  box.remove();
  if (!isDone) throw new Error("The browser does not copy.");
  return undefined;
}
