// Pictures of the message that is being written: by the button, paste or drop. A picture is `{name, url}`, where the
// URL has its bytes, as the API takes them and the browser shows them.

const PICTURE_TYPES = ["jpeg", "png", "webp", "gif", "bmp", "tiff", "avif"].map((name) => `image/${name}`);
const MEGA = 1e6;

const inMegas = (count) => String(Math.round(count / MEGA * 10) / 10);

function limitsText({ max_items, max_bytes, max_pixels }, count) {
  return `${count} of ${max_items} pictures; each at most ${inMegas(max_bytes)} MB and ${inMegas(max_pixels)} megapixels`;
}

function numPictures(messages) {
  return messages.reduce((count, { pictures }) => count + (pictures?.length ?? 0), 0);
}

// Says why a file is not taken; null if it may be.
function refusalOf({ name, type, size }, limits) {
  if (!PICTURE_TYPES.includes(type)) return `${name} is no picture that the server reads.`;
  if (size > limits.max_bytes) return `${name} has ${inMegas(size)} MB; ${inMegas(limits.max_bytes)} are the most.`;
  return null;
}

async function readPicture(file, limits) {
  const refusal = refusalOf(file, limits);
  if (refusal) throw new Error(refusal);
  const { width, height } = await sizeOf(file);
  if (width * height > limits.max_pixels) {
    const most = inMegas(limits.max_pixels);
    throw new Error(`${file.name} has ${inMegas(width * height)} megapixels; ${most} are the most.`);
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

function drawnPicture({ name, url }) {
  const image = element("img");
  image.src = url;
  image.alt = name;
  return image;
}

// What the composer holds. `limits()` are those of the model, or nothing; `count()` is how many the chat has already.
class PictureTray {
  constructor(root, { limits, count, onChange }) {
    this.root = root;
    this.limits = limits;
    this.count = count;
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
        const picture = await readPicture(file, limits);
        if (this.count() + this.pictures.length >= limits.max_items) {
          throw new Error(`A conversation has at most ${limits.max_items} pictures.`);
        }
        this.set([...this.pictures, picture]);
      } catch (error) {
        refused.push(error.message);
      }
    }
    this.onChange();
    say(refused.join(" "));
  }

  remove(picture) {
    this.set(this.pictures.filter((other) => other !== picture));
    this.onChange();
    byId("prompt").focus();
  }

  draw() {
    const limits = this.limits();
    this.root.hidden = !this.pictures.length;
    const list = element("ul");
    for (const picture of this.pictures) {
      const item = element("li");
      const remove = button("✕", "icon", () => this.remove(picture));
      remove.setAttribute("aria-label", `Remove ${picture.name}`);
      item.append(drawnPicture(picture), remove);
      list.append(item);
    }
    const text = limits ? limitsText(limits, this.count() + this.pictures.length) : "This model takes text only.";
    this.root.replaceChildren(list, element("p", text, "quiet"));
  }
}
