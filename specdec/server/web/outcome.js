// What runs come to, in words: one answer, or one request answered twice, with speculation and without.

/** Say what an answer has come to: its size and speed, and what its drafts gave; `asked` holds `speculate`, and the
    server's `drafters` where it has told them. */
export function summary(tally, asked) {
  const speed = tally.rate === null ? "" : `, ${tally.rate.toFixed(tally.rate < 10 ? 1 : 0)} tokens a second`;
  const length = tally.length === null ? "" : `Acceptance length ${tally.length.toFixed(2)}.`;
  const drafts = [length, known(tally), undrafted(tally, asked)].filter(Boolean).join(" ");
  return { size: `${tally.tokens} tokens${speed}.`, drafts };
}

export function verdict(on, off, { dtype, drafters }) {
  const isSame = on.text === off.text;
  const ratio = on.tally.rate && off.tally.rate ? on.tally.rate / off.tally.rate : null;
  const texts = isSame ? "The texts are equal." : `The texts differ from character ${parting(on.text, off.text) + 1} on.`;
  const why = undrafted(on.tally, { drafters, speculate: true });
  const isPointless = drafters?.length === 0;
  const speed = isPointless ? "This server has no drafters: both were written without drafts."
    : ratio === null ? "They are too short to be timed."
    : `With speculation it is ${ratio.toFixed(2)} times as fast: ${rate(on)} against ${rate(off)} tokens/s.`;
  const remarks = [
    "One after the other, in this one run; times are the server's, after the first token.",
    !isPointless && why,
    !isSame && `In ${dtype ?? "low precision"} windows of different widths are rounded differently, which can swap two nearly equal tokens.`,
    !isSame && dtype !== "float32" && "With --dtype float32 that hardly ever happens.",
    known(on.tally),
  ];
  return { isSame, ratio, says: `${texts} ${speed}`, remarks: remarks.filter(Boolean).join(" ") };
}

/** Say what the server has decided on by itself; what is fixed has no figures. */
export function decision(outlook) {
  return outlook?.cost ? `The server has measured what drafts earn: now ${outlook.reason}.` : "";
}

/** Say how much was no guess: the same had been written before. */
function known({ known, accepted }) {
  return known ? `${known} of ${accepted} accepted tokens were looked up in earlier answers.` : "";
}

/** Say why no step had a draft, where none had. */
function undrafted(tally, { drafters, speculate }) {
  if (tally.drafted !== 0 || !tally.steps) return "";
  if (drafters?.length === 0) return "This server has no drafters.";
  return speculate ? "Nothing looked worth drafting." : "Speculation was off.";
}

const rate = ({ tally }) => tally.rate.toFixed(tally.rate < 100 ? 1 : 0);

function parting(one, other) {
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return at;
}
