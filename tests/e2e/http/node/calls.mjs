// OpenAI's Node SDK as a program for the hosted service uses it: all that it knows of the server is
// in OPENAI_BASE_URL and OPENAI_API_KEY. Makes the calls of a JSON list, [endpoint, fields] each,
// with one recording, and prints the list of the answers; a stream's is the list of its events.
//
//     node calls.mjs RECORDING CALLS

import fs from "node:fs";
import OpenAI from "openai";

const client = new OpenAI();
const [recording, calls] = process.argv.slice(2);
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
console.log(JSON.stringify(answers));
