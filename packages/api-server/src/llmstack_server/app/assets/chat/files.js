// Pictures and sounds of the message that is being written: by the button, paste or drop. Each is `{name, url}`, where the
// URL has its bytes, as the API takes them and the browser shows them.

const PICTURE_TYPES = ["jpeg", "png", "webp", "gif", "bmp", "tiff", "avif"].map((name) => `image/${name}`);
const MEGA = 1e6;

const inMegas = (count) => String(Math.round(count / MEGA * 10) / 10);
const isSound = ({ url }) => url.startsWith("data:audio/");

// `pictures`, `sounds`, or `both` where a model takes both; `end` is that of a name.
function kindsText({ pictures, sounds }, both, end) {
  return pictures && sounds ? both : `${pictures ? "picture" : "sound"}${end}`;
}

// What the limits are, and how many files of `{url}` there are already.
function limitsText({ pictures, sounds }, files) {
  const numSounds = files.filter(isSound).length;
  const texts = [];
  if (pictures) {
    const size = `${inMegas(pictures.max_bytes)} MB and ${inMegas(pictures.max_pixels)} megapixels`;
    texts.push(`${files.length - numSounds} of ${pictures.max_items} pictures; each at most ${size}`);
  }
  if (sounds) texts.push(`${numSounds} of ${sounds.max_items} sounds; each at most ${inMegas(sounds.max_bytes)} MB`);
  return texts.join(". ");
}

function filesOfMessages(messages) {
  return messages.flatMap(({ pictures }) => pictures ?? []);
}

// The limits of a file's kind; nothing for a kind that the model does not take.
function limitsOf({ type }, { pictures, sounds }) {
  if (type.startsWith("audio/")) return sounds;
  return PICTURE_TYPES.includes(type) ? pictures : null;
}

// Says why a file is not taken; null if it may be.
function refusalOf(file, limits) {
  const own = limitsOf(file, limits);
  if (!own) return `${file.name} is no ${kindsText(limits, "picture or sound", "")} that the server reads.`;
  if (file.size > own.max_bytes) return `${file.name} has ${inMegas(file.size)} MB; ${inMegas(own.max_bytes)} are the most.`;
  return null;
}

async function readFile(file, limits) {
  const refusal = refusalOf(file, limits);
  if (refusal) throw new Error(refusal);
  const { max_pixels: maxPixels } = limitsOf(file, limits);
  if (maxPixels) {
    const { width, height } = await sizeOf(file);
    if (width * height > maxPixels) {
      throw new Error(`${file.name} has ${inMegas(width * height)} megapixels; ${inMegas(maxPixels)} are the most.`);
    }
  }
  return { name: file.name, url: await dataUrl(file) };
}

async function sizeOf(file) {
  const image = new Image();
  image.src = URL.createObjectURL(file);
  try {
    await image.decode();
    return { width: image.naturalWidth, height: image.naturalHeight };
  } catch {
    throw new Error(`${file.name} is damaged, or this browser does not show its kind.`);
  } finally {
    URL.revokeObjectURL(image.src);
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

function drawnFile(file) {
  const drawn = element(isSound(file) ? "audio" : "img");
  drawn.src = file.url;
  if (isSound(file)) {
    drawn.controls = true;
    drawn.setAttribute("aria-label", file.name);
  } else {
    drawn.alt = file.name;
  }
  return drawn;
}

// What the composer holds. `limits()` are those of the model, or nothing; `before()` are the files of the chat so far.
class FileTray {
  constructor(root, { limits, before, onChange }) {
    this.root = root;
    this.limits = limits;
    this.before = before;
    this.onChange = onChange;
    this.pictures = [];
  }

  set(pictures) {
    this.pictures = pictures;
    this.draw();
  }

  // Takes files, and says of which it takes none, and why.
  async add(files) {
    const limits = this.limits();
    if (!limits) throw new Error("This model takes text only.");
    const refused = [];
    for (const file of files) {
      try {
        const read = await readFile(file, limits);
        const { max_items: most } = isSound(read) ? limits.sounds : limits.pictures;
        if (this.all().filter((other) => isSound(other) === isSound(read)).length >= most) {
          throw new Error(`A conversation has at most ${most} ${isSound(read) ? "sounds" : "pictures"}.`);
        }
        this.set([...this.pictures, read]);
      } catch (error) {
        refused.push(error.message);
      }
    }
    this.onChange();
    say(refused.join(" "));
  }

  all() {
    return [...this.before(), ...this.pictures];
  }

  remove(file) {
    this.set(this.pictures.filter((other) => other !== file));
    this.onChange();
    byId("prompt").focus();
  }

  draw() {
    const limits = this.limits();
    this.root.hidden = !this.pictures.length;
    const list = element("ul");
    for (const file of this.pictures) {
      const item = element("li");
      const remove = button("✕", "icon", () => this.remove(file));
      remove.setAttribute("aria-label", `Remove ${file.name}`);
      item.append(drawnFile(file), remove);
      list.append(item);
    }
    const text = limits ? limitsText(limits, this.all()) : "This model takes text only.";
    this.root.replaceChildren(list, element("p", text, "quiet"));
  }
}
