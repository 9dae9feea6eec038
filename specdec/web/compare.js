// What two runs of one request come to: with speculation, and without.

export function verdict(on, off, { dtype, isKnown }) {
  const isSame = on.text === off.text;
  const ratio = on.tally.rate && off.tally.rate ? on.tally.rate / off.tally.rate : null;
  const texts = isSame ? "The texts are equal." : `The texts differ from character ${parting(on.text, off.text) + 1} on.`;
  const speed = ratio === null ? "They are too short to be timed."
    : `With speculation it is ${ratio.toFixed(2)} times as fast: ${rate(on)} against ${rate(off)} tokens/s.`;
  const remarks = [
    "One after the other, in this one run; times are the server's, after the first token.",
    !isSame && `In ${dtype ?? "low precision"} windows of different widths are rounded differently, which can swap two nearly equal tokens.`,
    !isSame && dtype !== "float32" && "With --dtype float32 that hardly ever happens.",
    isKnown && "This text was written before, so the server may have looked it up.",
  ];
  return { isSame, ratio, says: `${texts} ${speed}`, remarks: remarks.filter(Boolean).join(" ") };
}

const rate = ({ tally }) => tally.rate.toFixed(tally.rate < 100 ? 1 : 0);

function parting(one, other) {
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return at;
}
