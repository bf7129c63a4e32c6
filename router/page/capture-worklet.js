// Runs in the browser's audio thread: mixes a microphone's samples to one channel, resamples them,
// and posts pieces of 50 ms as 16-bit PCM with their loudness.

import { Resampler } from "./resample.js";

const PIECE_S = 0.05;

class Capture extends AudioWorkletProcessor {
  constructor({ processorOptions: { rate } }) {
    super();
    this.resampler = sampleRate === rate ? null : new Resampler(sampleRate, rate);
    this.length = Math.round(rate * PIECE_S);
    this.piece = new Int16Array(this.length);
    this.filled = 0;
    this.power = 0;
  }

  process([channels]) {
    if (!channels.length) return true;
    const mono = new Float32Array(channels[0].length);
    for (const channel of channels) channel.forEach((value, i) => { mono[i] += value / channels.length; });
    for (const value of this.resampler ? this.resampler.push(mono) : mono) this.add(value);
    return true;
  }

  add(value) {
    this.piece[this.filled++] = Math.round(32767 * Math.max(-1, Math.min(1, value)));
    this.power += value * value;
    if (this.filled < this.length) return;
    this.port.postMessage({ pcm: this.piece.buffer, rms: Math.sqrt(this.power / this.filled) }, [this.piece.buffer]);
    this.piece = new Int16Array(this.length); // posting has detached the old one
    [this.filled, this.power] = [0, 0];
  }
}

registerProcessor("capture", Capture);
