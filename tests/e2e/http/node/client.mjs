// OpenAI's Node SDK against a running server: makes the calls, prints what came as one JSON
// object, and judges nothing; tests/e2e/http/test_node_sdk.py does.
//
//     node client.mjs BASE_URL SHORT_RECORDING LONG_RECORDING

import fs from "node:fs";
import OpenAI, { toFile } from "openai";

const [baseURL, short, long] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const transcriptions = client.audio.transcriptions;
const model = "whisper-1";
const bytes = fs.readFileSync(short);

async function uploads() {
  const files = {
    "fs.createReadStream": fs.createReadStream(short),
    File: new File([bytes], "speech.flac", { type: "audio/flac" }),
    "toFile of a Blob": await toFile(new Blob([bytes]), "speech.flac"),
  };
  const texts = {};
  for (const [kind, file] of Object.entries(files)) {
    texts[kind] = (await transcriptions.create({ model, file })).text;
  }
  return texts;
}

// What the last call raised, and the events before it.
async function failure(call) {
  const before = [];
  try {
    const result = await call();
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

async function failures() {
  const garbage = await toFile(Buffer.from("no audio at all"), "speech.flac");
  const damaged = fs.readFileSync(long);
  const at = Math.floor(0.7 * damaged.length);
  damaged.fill(0, at, at + 20_000);
  const file = await toFile(damaged, "talk.flac");
  return {
    garbage: await failure(() => transcriptions.create({ model, file: garbage })),
    "garbage, streamed": await failure(() =>
      transcriptions.create({ model, file: garbage, stream: true }),
    ),
    model: await failure(() => transcriptions.create({ model: "whisper-99", file: garbage })),
    temperature: await failure(() =>
      transcriptions.create({ model, file: garbage, temperature: 7 }),
    ),
    "in mid-stream": await failure(() => transcriptions.create({ model, file, stream: true })),
  };
}

async function models() {
  const listed = [];
  for await (const one of client.models.list()) listed.push(one.id);
  return { listed, slashed: (await client.models.retrieve(`openai/${listed[0]}`)).id };
}

async function headers() {
  const file = fs.createReadStream(short);
  const { data, response, request_id } = await transcriptions
    .create({ model, file })
    .withResponse();
  return { text: data.text, request_id, timing: response.headers.get("server-timing") };
}

const parts = { uploads, failures, models, headers };
const report = {};
for (const [name, part] of Object.entries(parts)) report[name] = await part();
console.log(JSON.stringify(report));
