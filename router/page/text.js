// Pure functions for a transcript's words and files. A test compares the files with the server's.
//
// A segment is {start, end, text, words, speaker}, where `speaker` may be missing; its words are {text, start, end, probability},
// where `text` keeps the space before the word, so that the joined words are the segment's text.

/**
 * Give each segment its words from the API's list for the whole answer. A segment whose text does
 * not begin with the next words gets none.
 */
export function wordsIntoSegments(segments, words) {
  let next = 0;
  return segments.map((segment) => {
    const own = [];
    let cursor = 0;
    while (next < words.length) {
      const bare = words[next].word.trim();
      const at = segment.text.indexOf(bare, cursor);
      if (at < 0 || segment.text.slice(cursor, at).trim() !== "" || at + bare.length > segment.text.length) break;
      const { start, end, probability } = words[next];
      own.push({ text: segment.text.slice(cursor, at + bare.length), start, end, probability });
      cursor = at + bare.length;
      next += 1;
    }
    if (own.length) own[own.length - 1].text += segment.text.slice(cursor);
    return { start: segment.start, end: segment.end, text: segment.text, speaker: segment.speaker, words: own };
  });
}

/**
 * The segment with the edited text `said`, after its leading space if it has one. Unchanged words
 * keep their times; new ones share the time between them, with probability 1.
 */
export function withText(segment, said) {
  const spoken = segment.words;
  const text = said && segment.text.match(/^\s*/)[0] + said;
  const wanted = text.match(/\s*\S+/g) ?? [];
  if (!spoken.length || !wanted.length) return { ...segment, text, words: [] };
  const same = (i, j) => spoken[i].text.trim() === wanted[j].trim();
  let head = 0;
  while (head < Math.min(spoken.length, wanted.length) && same(head, head)) head += 1;
  let tail = 0;
  const room = Math.min(spoken.length, wanted.length) - head;
  while (tail < room && same(spoken.length - 1 - tail, wanted.length - 1 - tail)) tail += 1;
  const start = head ? spoken[head - 1].end : segment.start;
  const end = tail ? spoken[spoken.length - tail].start : segment.end;
  const n = wanted.length - head - tail;
  const at = (i) => start + ((Math.max(end, start) - start) * i) / Math.max(n, 1);
  const words = wanted.map((word, i) => {
    if (i < head) return { ...spoken[i], text: word };
    if (i >= wanted.length - tail) return { ...spoken[spoken.length - wanted.length + i], text: word };
    return { text: word, start: at(i - head), end: at(i - head + 1), probability: 1 };
  });
  return { ...segment, text, words };
}

export const FORMATS = {
  txt: { type: "text/plain;charset=utf-8", write: (transcript) => txt(transcript.segments) },
  srt: { type: "application/x-subrip;charset=utf-8", write: (transcript) => srt(transcript.segments) },
  vtt: { type: "text/vtt;charset=utf-8", write: (transcript) => vtt(transcript.segments) },
  json: { type: "application/json", write: json },
};

const oneLine = (text) => text.trim().replace(/\s*[\r\n]\s*/g, " ");
const cueText = (text) => oneLine(text).replace(/-{2,}>/g, "->"); // a player would read it as times
const name = ({ speaker }) => (speaker ? `${speaker}: ` : "");
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const voice = ({ speaker }) => (speaker ? `<v ${escaped(speaker)}>` : "");

/** One line per segment. */
export const txt = (segments) => segments.map((one) => `${name(one)}${oneLine(one.text)}\n`).join("");

/** A SubRip file, one cue per segment. */
export const srt = (segments) => segments
  .map((one, i) => `${i + 1}\n${stamp(one.start, ",", true)} --> ${stamp(one.end, ",", true)}\n${cueText(name(one) + one.text.trim())}\n\n`)
  .join("");

/** A WebVTT file, one cue per segment. */
export const vtt = (segments) => "WEBVTT\n\n" + segments
  .map((one) => `${stamp(one.start, ".", false)} --> ${stamp(one.end, ".", false)}\n${voice(one)}${cueText(one.text)}\n\n`)
  .join("");

/** The answer as `verbose_json`, with the edited text. */
function json(transcript) {
  const { segments, language, duration, task } = transcript;
  const words = segments.flatMap(({ words, speaker }) => words.map((word) => ({ ...word, speaker })));
  const turn = (segment, i) => {
    if (i && segment.speaker === segments[i - 1].speaker) return segment.text;
    return `${i && segment.speaker ? "\n" : ""}${name(segment)}${segment.speaker ? segment.text.trim() : segment.text}`;
  };
  return JSON.stringify({
    task,
    language,
    duration,
    text: segments.map(turn).join("").trim(),
    segments: segments.map(({ start, end, text, speaker }, id) => ({ id, start, end, text, speaker })),
    words: words.map((word) => ({ ...word, text: undefined, word: word.text.trim() })),
  }, null, 2) + "\n";
}

function stamp(seconds, marker, withHours) {
  const total = Math.round(1000 * seconds);
  const two = (value) => String(value).padStart(2, "0");
  const hours = Math.floor(total / 3_600_000);
  const rest = `${two(Math.floor(total / 60_000) % 60)}:${two(Math.floor(total / 1000) % 60)}${marker}${String(total % 1000).padStart(3, "0")}`;
  return withHours || hours ? `${two(hours)}:${rest}` : rest;
}
