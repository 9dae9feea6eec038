// What runs come to, in words: one answer, or one request answered twice, with speculation and without.

/** Say what an answer has come to; `asked` holds `speculate`, and the server's `drafters` and
    `outlook`, which drafts run and why, where it has told them. */
export function summary(tally, asked) {
  const length = tally.length === null ? "" : `, acceptance length ${tally.length.toFixed(2)}`;
  const speed = tally.rate === null ? "" : `, ${tally.rate.toFixed(0)} tokens a second`;
  const says = [`Done: ${tally.tokens} tokens${length}${speed}.`, known(tally), undrafted(tally, asked), why(asked)];
  return says.filter(Boolean).join(" ");
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
function why({ speculate, outlook }) {
  return speculate && outlook?.cost ? `Now ${outlook.reason}.` : "";
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
