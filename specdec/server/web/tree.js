// A drawing of one verify step's draft tree: the accepted path in the first row, rejected branches below.

import { spelled } from "./element.js";

const SVG = "http://www.w3.org/2000/svg";
const CHARACTER = 7.3, HEIGHT = 24, ROW = 32, GAP = 28, MARGIN = 10, LONGEST = 14;

/** Return a token's text in one line, with symbols for whitespace. */
export function visible(text) {
  if (/^ {3,}$/.test(text)) return `␣×${text.length}`;
  const shown = text.replace(/\r/g, "␍").replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (s) => "␣".repeat(s.length)) || "∅";
  const letters = [...spelled(shown)];
  return letters.length > LONGEST ? `${letters.slice(0, LONGEST - 1).join("")}…` : shown;
}

/** Compute node positions: column by depth, row by branch; the model's own token is last. */
export function layout({ texts, parents, accepted, bonus }) {
  const lit = new Set(accepted);
  const nodes = texts.map((text, i) => ({ text, parent: parents[i], lit: lit.has(i), isBonus: false, below: [] }));
  if (bonus) nodes.push({ text: bonus.text, parent: accepted.at(-1) ?? 0, lit: true, isBonus: true, below: [] });
  const widths = [];
  for (const node of nodes) {
    node.depth = node.parent < 0 ? 0 : nodes[node.parent].depth + 1;
    node.label = visible(node.text);
    node.width = Math.max([...node.label].length * CHARACTER + 14, 26);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
    if (node.parent >= 0) nodes[node.parent].below.push(node);
  }
  const starts = [MARGIN];
  for (const width of widths) starts.push(starts.at(-1) + width + GAP);
  let rows = 0;
  // A stack, not recursion: a draft may be a long chain.
  const stack = [nodes[0]];
  while (stack.length) {
    const node = stack.pop();
    node.x = starts[node.depth];
    const above = nodes[node.parent];
    const isFirst = !above || sorted(above)[0] === node;
    node.row = isFirst && above ? above.row : rows++;
    node.y = MARGIN + node.row * ROW + HEIGHT / 2;
    stack.push(...sorted(node).reverse());
  }
  return { nodes, width: starts.at(-1) - GAP + MARGIN, height: 2 * MARGIN + (rows - 1) * ROW + HEIGHT };
}

const sorted = (node) => [...node.below].sort((a, b) => b.lit - a.lit);

/** Draw a step into an SVG element, replacing its content. */
export function draw(svg, draft) {
  const { nodes, width, height } = layout(draft);
  const edges = [], boxes = [];
  for (const [i, node] of nodes.entries()) {
    const name = node.lit ? "lit" : node.parent < 0 ? "root" : "rest";
    const about = { class: name, ...(node.lit && { "data-origin": node.isBonus ? 0 : node.depth }) };
    const box = make("g", about);
    box.style.setProperty("--level", node.depth);
    const text = make("text", { x: node.x + node.width / 2, y: node.y + 4, "text-anchor": "middle" });
    text.textContent = node.label;
    box.append(make("rect", { x: node.x, y: node.y - HEIGHT / 2, width: node.width, height: HEIGHT, rx: 5 }), text);
    boxes.push(box);
    if (i === 0) continue;
    const above = nodes[node.parent];
    const from = above.x + above.width, middle = node.x - GAP / 2;
    const edge = make("path", { ...about, d: `M${from} ${above.y}H${middle - 8}C${middle} ${above.y} ${middle} ${node.y} ${middle + 8} ${node.y}H${node.x}` });
    edge.style.setProperty("--level", node.depth);
    edges.push(edge);
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("aria-label", describe(draft));
  // Accepted edges are drawn over the others.
  edges.sort((a, b) => a.classList.contains("lit") - b.classList.contains("lit"));
  svg.replaceChildren(...edges, ...boxes);
}

export function describe({ texts, accepted, bonus }) {
  const path = accepted.map((node) => JSON.stringify(texts[node])).join(", ");
  const bonusNote = bonus ? `; the model's own token: ${JSON.stringify(bonus.text)}` : "";
  return `After ${JSON.stringify(texts[0])}: ${texts.length - 1} drafted, ${accepted.length} accepted${path && ` (${path})`}${bonusNote}`;
}

function make(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
