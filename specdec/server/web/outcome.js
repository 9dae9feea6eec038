// Results in words: of one answer, or of one request answered twice, with drafts and without.

/** Return an answer's size and speed, and its drafts' acceptance, in words; `asked` has `speculate`, and the server's
    `drafters` if they are known. */
export function summary(tally, asked) {
  const speed = tally.rate === null ? "" : `, ${tally.rate.toFixed(tally.rate < 10 ? 1 : 0)} tokens/s`;
  const length = tally.length === null ? "" : `Acceptance length ${tally.length.toFixed(2)}.`;
  const drafts = [length, known(tally), undrafted(tally, asked)].filter(Boolean).join(" ");
  return { size: `${tally.tokens} tokens${speed}.`, drafts };
}

export function verdict(on, off, { dtype, drafters }) {
  const isSame = on.text === off.text;
  const ratio = on.tally.rate && off.tally.rate ? on.tally.rate / off.tally.rate : null;
  const texts = isSame ? "The texts are equal." : `The texts differ from character ${parting(on.text, off.text) + 1}.`;
  const why = undrafted(on.tally, { drafters, speculate: true });
  const isPointless = drafters?.length === 0;
  const speed = isPointless ? "This server has no drafters: both answers were generated without drafts."
    : ratio === null ? "The answers are too short to time."
    : `Speedup ${ratio.toFixed(2)}×${ratio.toFixed(2) < 1 ? " (slower)" : ""}: ${rate(on)} tokens/s with drafts, ${rate(off)} without.`;
  const remarks = [
    "One run each, timed by the server after the first token.",
    !isPointless && why,
    !isSame && `In ${dtype ?? "low precision"} the window width can change rounding, which can swap two nearly equal tokens.`,
    !isSame && dtype !== "float32" && "With --dtype float32 that is rare.",
    known(on.tally),
  ];
  return { isSame, ratio, says: `${speed} ${texts}`, remarks: remarks.filter(Boolean).join(" ") };
}

/** Return the policy's current choice in words; a fixed shape has none. */
export function decision(outlook) {
  return outlook?.cost ? `Adaptive drafting: ${outlook.reason}.` : "";
}

/** Return how many accepted tokens were copied from earlier outputs. */
function known({ known, accepted }) {
  return known ? `${known} of ${accepted} accepted tokens were looked up in earlier answers.` : "";
}

/** Return why no step had a draft, or nothing if one had. */
function undrafted(tally, { drafters, speculate }) {
  if (tally.drafted !== 0 || !tally.steps) return "";
  if (drafters?.length === 0) return "This server has no drafters.";
  return speculate ? "No draft was worth its cost." : "Drafts were off.";
}

const rate = ({ tally }) => tally.rate.toFixed(tally.rate < 100 ? 1 : 0);

function parting(one, other) {
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return at;
}
