// As much of a browser's document as the page's modules ask for, so that Node can run them: elements
// without a layout, each made when it is first asked for by its id. `fire` is what a user does.

const named = new Map();

export class Element {
  children = []; // elements and texts
  parent = null;
  dataset = {};
  style = { setProperty() {} };
  elements = new Proxy({}, {
    get: (known, name) => (name === Symbol.iterator ? () => Object.values(known).values() : (known[name] ??= new Element())),
  });
  value = "";
  paused = true;
  currentTime = 0;
  #attributes = new Map();
  #listeners = [];

  setAttribute(name, value) {
    this.#attributes.set(name, String(value));
    if (name.startsWith("data-")) this.dataset[name.slice(5)] = String(value);
  }
  getAttribute(name) { return this.#attributes.get(name) ?? null; }
  hasAttribute(name) { return this.#attributes.has(name); }
  removeAttribute(name) { this.#attributes.delete(name); }
  get className() { return this.getAttribute("class") ?? ""; }
  set className(value) { this.setAttribute("class", value); }
  get classList() {
    const all = new Set(this.className.split(" "));
    const toggle = (name, on = !all.has(name)) => {
      all[on ? "add" : "delete"](name);
      this.className = [...all].join(" ");
    };
    return { toggle, add: (name) => toggle(name, true), remove: (name) => toggle(name, false), contains: (name) => all.has(name) };
  }

  get textContent() { return this.children.map((one) => one.textContent ?? one).join(""); }
  set textContent(text) { this.replaceChildren(String(text)); }
  get childElementCount() { return this.children.length; }
  append(...added) {
    for (const one of added.flatMap((each) => (each.isFragment ? each.children : [each]))) {
      if (one instanceof Element) one.parent = this;
      this.children.push(one);
    }
  }
  replaceChildren(...added) {
    this.children = [];
    this.append(...added);
  }
  before(added) { this.parent.children.splice(this.parent.children.indexOf(this), 0, added); }
  remove() { this.parent?.children.splice(this.parent.children.indexOf(this), 1); }
  querySelector(selector) {
    for (const one of this.children.filter((each) => each instanceof Element)) {
      const found = one.is(selector) ? one : one.querySelector(selector);
      if (found) return found;
    }
    return null;
  }
  is(selector) {
    return selector.split(", ").some((one) => {
      if (one.startsWith(".")) return this.classList.contains(one.slice(1));
      return one.startsWith("[") ? this.hasAttribute(one.slice(1, -1)) : this.tagName === one;
    });
  }
  closest(selector) { return this.is(selector) ? this : this.parent?.closest(selector) ?? null; }
  contains() { return false; }

  addEventListener(type, listener) { this.#listeners.push([type, listener]); }
  fire(type, fields = {}) {
    const event = { type, target: this, preventDefault() {}, ...fields };
    for (let one = this; one; one = one.parent) one.#hear(event);
  }
  #hear(event) {
    this[`on${event.type}`]?.(event);
    for (const [type, listener] of this.#listeners) if (type === event.type) listener(event);
  }

  focus() {}
  pause() {}
  scrollIntoView() {}
}

export const byId = (id) => {
  if (!named.has(id)) named.set(id, new Element());
  return named.get(id);
};

/** The window's listeners hear what this element does not. */
export const top = new Element();

const track = { stop() {}, addEventListener() {} };
const microphone = { getAudioTracks: () => [track], getTracks: () => [track] };
const mediaDevices = { getUserMedia: async () => microphone };

Object.defineProperty(globalThis, "navigator", { value: { mediaDevices } });
Object.assign(globalThis, {
  document: {
    baseURI: "http://localhost/",
    body: top,
    getElementById: byId,
    createElement: (tagName) => Object.assign(new Element(), { tagName }),
    createDocumentFragment: () => Object.assign(new Element(), { isFragment: true }),
    querySelectorAll: () => [],
    addEventListener() {},
  },
  location: new URL("http://localhost/"),
  addEventListener: (type, listener) => top.addEventListener(type, listener),
  history: { replaceState() {} },
  matchMedia: () => ({ matches: false }),
  fetch: () => new Promise(() => {}), // a server that does not answer
  window: { isSecureContext: true },
  Audio: Element,
  AudioContext: class {
    audioWorklet = { addModule: async () => {} };
    createMediaStreamSource = () => ({ connect() {} });
    async resume() {}
    close() {}
  },
  AudioWorkletNode: class { port = {}; },
  WebSocket: class { // the last one is `socket`
    static OPEN = 1;
    readyState = 1;
    constructor() {
      globalThis.socket = this;
      setTimeout(() => this.onopen());
    }
    send() {}
    close() {}
  },
  FormData: class { // of a form that says nothing
    append() {}
    * [Symbol.iterator]() {}
  },
});
URL.createObjectURL = () => "blob:";
