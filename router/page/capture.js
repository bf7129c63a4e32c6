// Opens the microphone and delivers its samples.

import { place } from "./api.js";

const FLOOR_DB = -55; // the meter's zero

/** Its message tells the user why there is no microphone, and what to do. */
export class MicrophoneError extends Error {}

export class Microphone {
  #stream = null;
  #context = null;

  /**
   * @param onPiece gets {pcm: ArrayBuffer of int16, level: 0 to 1} every 50 ms.
   * @param onEnd is called when the microphone goes away by itself.
   * Throws MicrophoneError.
   */
  async open(rate, onPiece, onEnd) {
    this.#stream = await ask();
    try {
      this.#stream.getAudioTracks()[0].addEventListener("ended", onEnd);
      const [context, source] = connect(this.#stream, rate);
      this.#context = context;
      await context.audioWorklet.addModule(place("page/capture-worklet.js"));
      const node = new AudioWorkletNode(context, "capture", {
        numberOfOutputs: 0,
        processorOptions: { rate },
      });
      node.port.onmessage = ({ data }) => onPiece({ pcm: data.pcm, level: level(data.rms) });
      source.connect(node);
      await context.resume();
    } catch (error) {
      this.close();
      throw new MicrophoneError(`The browser cannot capture audio here: ${error.message}`);
    }
  }

  get stream() {
    return this.#stream;
  }

  close() {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    if (this.#context && this.#context.state !== "closed") this.#context.close();
    [this.#stream, this.#context] = [null, null];
  }
}

/** A context of the given rate if the browser can resample to it, else one of its own rate. */
function connect(stream, rate) {
  let context = null;
  try {
    context = new AudioContext({ sampleRate: rate });
    return [context, context.createMediaStreamSource(stream)];
  } catch {
    context?.close();
    context = new AudioContext();
    return [context, context.createMediaStreamSource(stream)];
  }
}

async function ask() {
  if (!window.isSecureContext || !navigator.mediaDevices) {
    throw new MicrophoneError(
      "Browsers give the microphone only to pages on HTTPS or on localhost. Open this page as "
      + "http://localhost or http://127.0.0.1 on the server's own machine, or put HTTPS in front of the server.",
    );
  }
  try {
    const wanted = { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true };
    return await navigator.mediaDevices.getUserMedia({ audio: wanted });
  } catch (error) {
    throw new MicrophoneError(REASONS[error.name] ?? `The microphone cannot be used: ${error.message}`);
  }
}

const REASONS = {
  NotAllowedError:
    "The browser refused the microphone. Allow it for this page: press the icon to the left of the address, "
    + "set Microphone to Allow, and try again. If it is allowed there, look at the system's privacy settings.",
  NotFoundError: "No microphone was found. Connect one, or choose one in the system's sound settings, and try again.",
  NotReadableError: "The microphone is there but cannot be read. Another program may be using it; close that and try again.",
};

/** Loudness as a share of the meter, on a decibel scale. */
function level(rms) {
  return Math.max(0, Math.min(1, 1 - (20 * Math.log10(rms + 1e-6)) / FLOOR_DB));
}
