// What the page asks of the server, and the key that it sends. The key lives in this module's
// memory only. Errors carry the API's own words.

const HEALTH_MS = 10_000; // after which the server counts as gone

const session = { key: "" };

/** What the server takes, as far as it has told by now. */
export const limits = { uploadBytes: Infinity };

/** An answer that is not a success. `status` is 0 where no answer came at all. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

/** Send this key from now on. Returns the one before. */
export function setKey(key) {
  const before = session.key;
  session.key = key;
  return before;
}

export const hasKey = () => session.key !== "";
export const authorization = () => (session.key ? { authorization: `Bearer ${session.key}` } : {});

/** A path of the API, wherever a proxy has put this page. */
export const place = (path) => new URL(path, document.baseURI);

/** A JSON answer of the API. Throws ApiError. */
export const call = async (path, options) => (await ask(path, options)).json();

/** One of the recordings that come with the server. Throws ApiError. */
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
 * Send one file, and hear of its text while the rest is still being transcribed.
 *
 * By XMLHttpRequest, since `fetch` does not tell how much of an upload has been sent.
 *
 * @param form FormData with every field.
 * @param {{task: string, signal: AbortSignal, onUpload: function(number), onEvent: function(object)}} told
 *   onUpload gets the share that was sent, from 0 to 1; onEvent each event of the stream.
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

/** Takes whole events from a growing text of server-sent events. */
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

/** A message with its lists as people write them: `['flac', 'mp3']` is flac, mp3. */
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
