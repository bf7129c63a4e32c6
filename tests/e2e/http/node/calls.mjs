// OpenAI's Node SDK as a program for the hosted service uses it: all that it knows of the server is
// in OPENAI_BASE_URL and OPENAI_API_KEY. Makes the calls of a JSON list, [endpoint, fields] each,
// with one recording, then a batch of the lines of a file, and prints the list of the answers; a
// stream's is the list of its events, the batch's its input, itself, and its two files.
//
//     node calls.mjs RECORDING CALLS LINES

import fs from "node:fs";
import OpenAI from "openai";

const client = new OpenAI();
const [recording, calls, lines] = process.argv.slice(2);
const answers = [];
for (const [endpoint, fields] of JSON.parse(calls)) {
  const file = fs.createReadStream(recording);
  const answer = await client.audio[endpoint].create({ ...fields, file });
  if (!fields.stream) {
    answers.push(answer);
    continue;
  }
  const events = [];
  for await (const event of answer) events.push(event);
  answers.push(events);
}
const file = await client.files.create({ file: fs.createReadStream(lines), purpose: "batch" });
let batch = await client.batches.create({
  input_file_id: file.id,
  endpoint: "/v1/audio/transcriptions",
  completion_window: "24h",
});
while (!["completed", "failed", "cancelled", "expired"].includes(batch.status)) {
  await new Promise((resolve) => setTimeout(resolve, 100));
  batch = await client.batches.retrieve(batch.id);
}
const texts = [];
for (const id of [batch.output_file_id, batch.error_file_id]) {
  texts.push(await (await client.files.content(id)).text());
}
answers.push([file, batch, ...texts]);
console.log(JSON.stringify(answers));
