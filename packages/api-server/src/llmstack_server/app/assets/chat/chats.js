// Chats in the browser's database (IndexedDB). It never holds a key.

const DATABASE = "llmstack";
const DATABASE_VERSION = 1;

function whenDone(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function whenComplete(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}

// Whole chats by id, their titles for the list, and small values by name. A browser without a database (some private
// windows) keeps them until the page is closed.
class ChatStore {
  constructor() {
    this.database = null;
    this.memory = { chats: new Map(), titles: new Map(), values: new Map() };
  }

  async open() {
    const request = indexedDB.open(DATABASE, DATABASE_VERSION);
    request.onupgradeneeded = () => {
      for (const name of ["chats", "titles", "values"]) request.result.createObjectStore(name);
    };
    this.database = await whenDone(request);
    this.database.onversionchange = () => this.database.close(); // a newer page is open
  }

  async change(names, work) {
    if (!this.database) return work((name) => new MemoryTable(this.memory[name]));
    const transaction = this.database.transaction(names, "readwrite");
    work((name) => transaction.objectStore(name));
    return whenComplete(transaction);
  }

  async read(name, key) {
    if (!this.database) return structuredClone(this.memory[name].get(key));
    return whenDone(this.database.transaction(name).objectStore(name).get(key));
  }

  save(chat) {
    const { id, title, updatedMs } = chat;
    return this.change(["chats", "titles"], (table) => {
      table("chats").put(chat, id);
      table("titles").put({ id, title, updatedMs }, id);
    });
  }

  load(id) {
    return this.read("chats", id);
  }

  remove(id) {
    return this.change(["chats", "titles", "values"], (table) => {
      table("chats").delete(id);
      table("titles").delete(id);
      table("values").delete(`draft ${id}`);
    });
  }

  // `{id, title, updatedMs}` of all chats, the latest first.
  async list() {
    const found = this.database
      ? await whenDone(this.database.transaction("titles").objectStore("titles").getAll())
      : [...this.memory.titles.values()];
    return found.sort((one, other) => other.updatedMs - one.updatedMs);
  }

  setValue(name, value) {
    return this.change(["values"], (table) => {
      if (value === undefined) table("values").delete(name);
      else table("values").put(value, name);
    });
  }

  value(name) {
    return this.read("values", name);
  }
}

class MemoryTable {
  constructor(map) {
    this.map = map;
  }

  put(value, key) {
    this.map.set(key, structuredClone(value));
  }

  delete(key) {
    this.map.delete(key);
  }
}
