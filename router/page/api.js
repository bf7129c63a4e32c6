// Calls the server's API. The key is kept in this module's memory only.

const HEALTH_MS = 10_000; // timeout of /health

const session = { key: "" };

/** The server's limits, as far as they are known. */
export const limits = { uploadBytes: Infinity };

/** An error of the API, with its message. `status` is 0 if no answer came. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

/** Set the key. Returns the previous one. */
export function setKey(key) {
  const before = session.key;
  session.key = key;
  return before;
}

export const hasKey = () => session.key !== "";
export const authorization = () => (session.key ? { authorization: `Bearer ${session.key}` } : {});

/** The URL of an API path, also when a proxy serves the page below a path. */
export const place = (path) => new URL(path, document.baseURI);

/** Call the API and return its JSON. Throws ApiError. */
export const call = async (path, options) => (await ask(path, options)).json();

/** Fetch one of the server's sample recordings. Throws ApiError. */
export async function sample(name) {
  return new File([await (await ask(`page/${name}`)).blob()], name, { type: "audio/flac" });
}

async function ask(path, options = {}) {
  let answer;
  try {
    const headers = { ...authorization(), ...options.headers };
    answer = await fetch(place(path), { ...options, headers, cache: "no-store" });
  } catch {
    throw new ApiError("The server does not answer.");
  }
  if (!answer.ok) throw failure(answer.status, await answer.text(), answer.headers.get("retry-after"));
  return answer;
}

/** The state of the pools; a server that is not ready answers too. Throws ApiError. */
export async function health() {
  try {
    const signal = AbortSignal.timeout(HEALTH_MS);
    const report = await (await fetch(place("health"), { cache: "no-store", signal })).json();
    limits.uploadBytes = report.router?.max_upload_bytes ?? Infinity;
    return report;
  } catch {
    throw new ApiError("The server does not answer.");
  }
}

/**
 * Send one file, and stream its text. Uses XMLHttpRequest, as `fetch` reports no upload progress.
 *
 * @param form FormData with every field.
 * @param {{task: string, signal: AbortSignal, onUpload: function(number), onEvent: function(object)}} told
 *   onUpload gets the uploaded share from 0 to 1, onEvent each event of the stream.
 * @returns the answer (the last event of a stream) and its `server-timing`. Throws ApiError.
 */
export function transcribe(form, { task, signal, onUpload, onEvent }) {
  const path = task === "translate" ? "v1/audio/translations" : "v1/audio/transcriptions";
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", place(path));
    for (const [name, value] of Object.entries(authorization())) request.setRequestHeader(name, value);
    const events = new EventReader();
    let last = null;
    const read = () => {
      for (const event of events.take(request.responseText)) {
        if (event.error) throw failure(request.status, JSON.stringify(event), null);
        if (event.type === "transcript.text.done") last = event;
        onEvent(event);
      }
    };
    const isStream = () =>
      request.status === 200 && (request.getResponseHeader("content-type") ?? "").startsWith("text/event-stream");
    const settle = (work) => {
      try {
        work();
      } catch (error) {
        reject(error);
        request.abort();
      }
    };
    request.upload.onprogress = (event) => event.lengthComputable && onUpload(event.loaded / event.total);
    request.upload.onload = () => onUpload(1);
    request.onprogress = () => isStream() && settle(read);
    request.onerror = () => reject(new ApiError("The connection to the server was lost."));
    request.onabort = () => reject(new DOMException("cancelled", "AbortError"));
    request.onload = () => settle(() => {
      if (request.status !== 200) {
        throw failure(request.status, request.responseText, request.getResponseHeader("retry-after"));
      }
      if (isStream()) {
        read();
        if (last === null) throw new ApiError("The answer ended too early: the connection was cut.");
        resolve({ answer: last, timing: last.server_timing ?? "" });
      } else {
        const timing = request.getResponseHeader("server-timing") ?? "";
        resolve({ answer: JSON.parse(request.responseText), timing });
      }
    });
    signal.addEventListener("abort", () => request.abort(), { once: true });
    request.send(form);
  });
}

/** Parses the complete events in a growing text of server-sent events. */
class EventReader {
  #from = 0;

  * take(text) {
    let end;
    while ((end = text.indexOf("\n\n", this.#from)) >= 0) {
      const block = text.slice(this.#from, end);
      this.#from = end + 2;
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length && data[0] !== "[DONE]") yield JSON.parse(data.join("\n"));
    }
  }
}

/** Write lists in a message without brackets: `['flac', 'mp3']` becomes flac, mp3. */
const plain = (message) => message.replace(/\['(.*?)'\]/g, (_, list) => list.replaceAll("', '", ", "));

function failure(status, body, retryAfter) {
  const about = { status, retryAfterS: Number(retryAfter) || null };
  try {
    const { error } = JSON.parse(body);
    return new ApiError(plain(String(error.message)), { ...about, code: error.code });
  } catch {
    return new ApiError(`The server answered with status ${status}.`, about); // a proxy's own page
  }
}
