// Whisper's languages; a test compares them with the model's. A checkpoint that knows fewer refuses
// the others.

const CODES = (
  "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml cy "
  + "sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am yi lo "
  + "uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
).split(" ");

/** [code, English name] of each language, sorted by name. */
export function languages() {
  const names = new Intl.DisplayNames("en", { type: "language" });
  const named = CODES.map((code) => [code, names.of(code === "jw" ? "jv" : code) ?? code]);
  return named.sort(([, a], [, b]) => a.localeCompare(b, "en"));
}
