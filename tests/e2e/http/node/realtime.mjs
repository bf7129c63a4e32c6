// OpenAI's Node SDK on the realtime API: node realtime.mjs BASE_URL MODEL PCM24K CERTIFICATE
// Pushes the recording (int16, 24 kHz, mono), commits, and prints the events as JSON.
// The SDK always connects by wss, so the address is a TLS proxy's; its socket options trust it.
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const [baseURL, model, file, certificate] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none" });
const options = { ca: readFileSync(certificate) };
const realtime = new OpenAIRealtimeWS({ model, options }, client);
const events = [];

realtime.on("error", (error) => {
  console.error(error);
  process.exit(1);
});
realtime.on("event", (event) => events.push(event));
realtime.on("session.created", () => {
  const transcription = { model, language: "en" };
  const format = { type: "audio/pcm", rate: 24000 };
  realtime.send({
    type: "session.update",
    session: {
      type: "transcription",
      audio: { input: { format, transcription, turn_detection: null } },
    },
  });
});
realtime.on("session.updated", () => {
  const pcm = readFileSync(file);
  for (let start = 0; start < pcm.length; start += 9600) {
    const audio = pcm.subarray(start, start + 9600).toString("base64");
    realtime.send({ type: "input_audio_buffer.append", audio });
  }
  realtime.send({ type: "input_audio_buffer.commit" });
});
realtime.on("conversation.item.input_audio_transcription.completed", () => {
  console.log(JSON.stringify(events));
  realtime.close();
});
