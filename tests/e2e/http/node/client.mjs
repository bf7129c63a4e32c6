// OpenAI's Node SDK against a running server: makes calls that fail, and prints what each raised as
// one JSON object.
//
//     node client.mjs BASE_URL LONG_RECORDING

import fs from "node:fs";
import OpenAI, { toFile } from "openai";

const [baseURL, recording] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = "whisper-1";

// What a call raised, and the events before it.
async function failure(fields) {
  const before = [];
  try {
    const result = await client.audio.transcriptions.create(fields);
    if (result?.[Symbol.asyncIterator]) {
      for await (const event of result) before.push(event.type);
    }
    return { raised: null, before };
  } catch (error) {
    return {
      raised: error.constructor.name,
      isAPIError: error instanceof OpenAI.APIError,
      status: error.status ?? null,
      code: error.code ?? null,
      param: error.param ?? null,
      message: error.message,
      requestID: error.requestID ?? null,
      before,
    };
  }
}

const garbage = await toFile(Buffer.from("no audio at all"), "speech.flac");
const damaged = fs.readFileSync(recording);
const at = Math.floor(0.7 * damaged.length);
damaged.fill(0, at, at + 20_000);
const file = await toFile(damaged, "talk.flac");
const calls = {
  garbage: { model, file: garbage },
  "garbage, streamed": { model, file: garbage, stream: true },
  model: { model: "whisper-99", file: garbage },
  temperature: { model, file: garbage, temperature: 7 },
  "in mid-stream": { model, file, stream: true },
};
const failures = {};
for (const [name, fields] of Object.entries(calls)) failures[name] = await failure(fields);
console.log(JSON.stringify(failures));
