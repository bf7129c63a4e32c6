// Helpers for the document. No module of the page parses a string as markup.

export const byId = (id) => document.getElementById(id);

/** Make an element: `make("p", {class: "note", "aria-hidden": "true"}, "text", child)`. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Announce a message to screen readers. */
export function announce(text) {
  byId("announce").textContent = text;
}

/** Copy text to the clipboard, also without HTTPS. Returns whether it worked. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", { class: "sr", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/** Let the user save text as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = make("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Show for two seconds on a button what it has done. */
export function flash(button, text) {
  if (button.dataset.flashing) return;
  const label = button.textContent;
  button.dataset.flashing = "yes";
  button.style.minWidth = `${button.offsetWidth}px`; // keeps neighbours in place
  button.textContent = text;
  announce(text);
  setTimeout(() => {
    button.textContent = label;
    button.style.minWidth = "";
    delete button.dataset.flashing;
  }, 2000);
}

/** Seconds as `m:ss`, from an hour on as `h:mm:ss`. */
export function clock(seconds) {
  const whole = Number.isFinite(seconds) ? Math.max(0, Math.floor(seconds)) : 0;
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const rest = String(whole % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

export function size(bytes) {
  if (bytes < 1000) return `${bytes} bytes`;
  if (bytes < 1_000_000) return `${Math.round(bytes / 1000)} kB`;
  return `${(bytes / 1_000_000).toFixed(1)} MB`;
}

export function duration(ms) {
  if (!Number.isFinite(ms)) return "\u2013"; // unknown
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
}

export const plural = (n, one, more = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : more}`;
