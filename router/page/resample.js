// Resamples a stream with a windowed sinc, for browsers that do not convert a microphone's rate.

const ZERO_CROSSINGS = 16; // of the sinc on each side
const PASS = 0.92; // pass band, as a share of the lower rate's

export class Resampler {
  #step; // input samples per output sample
  #cutoff; // of the low-pass, in cycles per input sample times two
  #reach; // input samples on each side of an output sample
  #input = new Float32Array(0);
  #from = 0; // place in the stream of #input's first sample
  #next = 0; // place in the stream of the next output sample, in input samples

  constructor(fromRate, toRate) {
    this.#step = fromRate / toRate;
    this.#cutoff = PASS * Math.min(1, toRate / fromRate);
    this.#reach = Math.ceil(ZERO_CROSSINGS / this.#cutoff);
  }

  /** Add samples (Float32Array). Returns the output samples that are complete now. */
  push(samples) {
    const input = new Float32Array(this.#input.length + samples.length);
    input.set(this.#input);
    input.set(samples, this.#input.length);
    const end = this.#from + input.length - this.#reach;
    const output = [];
    for (; this.#next < end; this.#next += this.#step) output.push(this.#sample(input, this.#next));
    const keep = Math.max(0, Math.floor(this.#next) - this.#reach - this.#from);
    this.#input = input.slice(keep);
    this.#from += keep;
    return Float32Array.from(output);
  }

  #sample(input, at) {
    const first = Math.max(0, Math.ceil(at - this.#reach) - this.#from);
    const last = Math.min(input.length - 1, Math.floor(at + this.#reach) - this.#from);
    let sum = 0;
    for (let i = first; i <= last; i += 1) sum += input[i] * this.#kernel(i + this.#from - at);
    return sum;
  }

  #kernel(x) {
    if (x === 0) return this.#cutoff;
    const angle = Math.PI * this.#cutoff * x;
    const hann = 0.5 + 0.5 * Math.cos((Math.PI * x) / this.#reach);
    return (this.#cutoff * Math.sin(angle) * hann) / angle;
  }
}
